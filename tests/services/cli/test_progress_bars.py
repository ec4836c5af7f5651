"""Bars of long loops: on a terminal only, not with --json, and one after the other."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli import block, progress_bars
from services.cli.progress_bars import LoopBars, bar, loop_bars, share_bar, show_line
from simulator.progress import followed


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error is a terminal, and every loop takes long."""
    stream = Terminal()
    monkeypatch.setattr(progress_bars, "sys", SimpleNamespace(stderr=stream))  # pytest sets the real one
    monkeypatch.setattr(progress_bars, "SHOW_S", 0.0)
    return stream


def test_a_long_loop_has_a_bar(terminal: Terminal) -> None:
    """Which reaches its end; the next loop has its own."""
    with loop_bars():
        assert list(followed(range(2000), "reading a", 2000)) == list(range(2000))
        assert sum(followed(range(2000), "writing b")) == sum(range(2000))
    shown = terminal.getvalue()
    assert "reading a" in shown
    assert "100%" in shown
    assert shown.index("reading a") < shown.index("writing b")


def test_a_short_loop_has_none(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a bar whose work is short."""
    monkeypatch.setattr(progress_bars, "SHOW_S", 60.0)
    with loop_bars():
        list(followed(range(2000), "reading", 2000))
    with bar(10, "requests") as at:
        at(5)
    with share_bar() as share:
        share(0.5)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error may be a file."""
    monkeypatch.setattr(progress_bars, "SHOW_S", 0.0)
    with loop_bars():
        list(followed(range(2000), "reading", 2000))
    show_line("text")
    assert capsys.readouterr().err == ""


def test_an_error_ends_the_line_of_its_bar(terminal: Terminal) -> None:
    """So that the message is on a line of its own."""
    with pytest.raises(ValueError, match="row 1000"), loop_bars():
        for item in followed(range(2000), "reading", 2000):
            if item == 1000:
                raise ValueError("row 1000")
    assert terminal.getvalue().endswith("\n")


def test_other_processes_show_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a command starts have its standard error."""
    bars = LoopBars()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for done in range(0, 2000, 100):
        bars.follow("reading", done, 2000)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_shows_bars_unless_json_is_asked_for(terminal: Terminal, tmp_path: Path, *, as_json: bool) -> None:
    """`block replay` of some hundred requests, each loop of which counts as long here."""
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "20,2\n" * 1200, encoding="utf-8")
    flags = ["--profile", "llama-2-7b-a30", *(["--json"] if as_json else [])]
    with loop_bars():
        block.main(["replay", str(trace), *flags], standalone_mode=False)
    assert ("reading requests" in terminal.getvalue()) is not as_json
