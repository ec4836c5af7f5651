"""The table of objectives that a server has: read at its start, followed while it runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from scheduler.objectives import UnknownObjectiveError
from services.objectives import ObjectiveTable, following, objectives_from_file
from tests.services.files import replace_file
from tests.services.waiting import run, until

CHAT = '[[objective]]\nname = "chat"\nttft_slo_s = 0.5\n'
BATCH = '[[objective]]\nname = "batch"\nclass = "best-effort"\n'


def test_a_server_without_a_file_knows_no_objective() -> None:
    """Its table is empty, and nothing is required of it."""
    table = ObjectiveTable(required=("chat",))
    assert not table
    with pytest.raises(UnknownObjectiveError, match=r"^x-block-objective: 'chat' is unknown: .*--objectives FILE"):
        table.named("chat", "x-block-objective")


def test_a_bad_file_is_refused_at_the_start(tmp_path: Path) -> None:
    """One line names the file, and the field or the name that keys need."""
    path = tmp_path / "objectives.toml"
    with pytest.raises(ValueError, match=f"^{path}: cannot be read"):
        ObjectiveTable(str(path))
    path.write_text(CHAT.replace("0.5", "0"))
    with pytest.raises(ValueError, match=rf"^{path}: objective\[0\].ttft_slo_s: must be a number above 0"):
        ObjectiveTable(str(path))
    path.write_text(CHAT)
    with pytest.raises(ValueError, match=f"^{path}: objective: 'batch' is missing, which is the objective of an API"):
        ObjectiveTable(str(path), required=("chat", "batch"))
    assert ObjectiveTable(str(path), required=("chat",)).named("chat", "x").slo.ttft_s == 0.5
    assert list(objectives_from_file(str(path))) == ["chat"]


def test_changes_are_taken_and_invalid_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid change is logged once and the last table stays; so does one that lacks the objective of a key."""
    path = tmp_path / "objectives.toml"
    path.write_text(CHAT)
    caplog.set_level(logging.INFO)

    def warnings() -> list[str]:
        return [str(vars(record)) for record in caplog.records if record.levelno == logging.WARNING]

    async def test() -> None:
        table = ObjectiveTable(str(path), required=("chat",))
        async with following(table, 0.001):
            replace_file(path, CHAT + "when_late = 'never'\n")
            await until(lambda: len(warnings()) == 1)
            assert "objective[0].when_late" in warnings()[0]
            replace_file(path, BATCH)
            await until(lambda: len(warnings()) == 2)
            path.unlink()
            await until(lambda: len(warnings()) == 3)
            assert table.named("chat", "x").slo.ttft_s == 0.5
            replace_file(path, CHAT.replace("0.5", "0.7") + BATCH)
            await until(lambda: "batch" in table.objectives)
            assert table.named("chat", "x").slo.ttft_s == 0.7

    run(test)
    assert len(warnings()) == 3
    (change,) = [record for record in caplog.records if record.message == "objectives changed"]
    assert change.levelno == logging.INFO
