"""Bars on standard error: only on a terminal, not with --json, and not for what takes less than two seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from simulator.progress import followed_by

SHOW_S = 2.0
SHARES = 100  # parts of a bar that shows a share


def are_shown() -> bool:
    """Return whether the present command shows bars."""
    context = click.get_current_context(silent=True)
    return sys.stderr.isatty() and not (context is not None and context.params.get("as_json"))


@contextmanager
def bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """Show how much of the work is done; call it with the amount."""
    shown = LoopBar(label, length)
    try:
        yield shown.at
        shown.at(length)
    finally:
        shown.close()


@contextmanager
def share_bar(label: str = "measuring") -> Iterator[Callable[[float], None]]:
    """Show how much of the time has passed; call it with the share."""
    with bar(SHARES, label) as at:
        yield lambda share: at(int(share * SHARES))


@contextmanager
def loop_bars() -> Iterator[None]:
    """Show a bar for every long loop of the block, one after the other: files that are read or written, and so on."""
    bars = LoopBars()
    with followed_by(bars.follow):
        try:
            yield
        finally:
            bars.close()


def show_line(text: str = "") -> None:
    """Replace the present line by a text; without one, clear it."""
    if are_shown():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


class LoopBar:
    """One bar, which is drawn when its work has taken a while; of an unknown length (0) it counts."""

    def __init__(self, label: str, length: int) -> None:
        """Start the time."""
        self.label, self.length = label, length
        self._is_shown = are_shown()
        self._start_s = time.monotonic()
        self._shown = 0
        self._bar: Any = None

    def at(self, done: int) -> None:
        """Draw what is done so far."""
        if not self._is_shown or done <= self._shown or time.monotonic() - self._start_s < SHOW_S:
            return
        if not self.length:
            show_line(f"{self.label}: {done}")
        else:
            if self._bar is None:
                self._bar = click.progressbar(length=self.length, label=self.label, file=sys.stderr)
            self._bar.update(done - self._shown)
        self._shown = done

    def close(self) -> None:
        """Leave the bar as it is, and end its line; a count is cleared."""
        if self._bar is not None:
            self._bar.render_finish()
        elif self._shown:
            show_line()
        self._bar, self._shown = None, 0


class LoopBars:
    """The bars of a command's loops; processes that it starts show none."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._process = os.getpid()
        self._bar: LoopBar | None = None

    def follow(self, doing: str, done: int, total: int) -> None:
        """Take the progress of a loop; another loop, or one that starts again, has a new bar."""
        if os.getpid() != self._process:
            return
        if self._bar is None or self._bar.label != doing or done == 0:
            self.close()
            self._bar = LoopBar(doing, total)
        self._bar.at(done)
        if 0 < total <= done:
            self.close()

    def close(self) -> None:
        """End the present bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
