"""The digest of source code: which edits have results measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.experiments import autoscaling_shapes, source_digest


@pytest.mark.parametrize("edited", autoscaling_shapes.CODE)
def test_rules_of_autoscaling_have_a_digest_of_their_own(
    edited: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edit of a rule has only the results of provisioning measured again."""
    path = tmp_path / edited
    path = path if path.suffix else path / "planner.py"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(source_digest, "ROOT", tmp_path)
    path.write_text("a = 1")
    before = source_digest.source_digest(), source_digest.digest_of(edited)
    path.write_text("a = 2")
    assert source_digest.source_digest() == before[0]
    assert source_digest.digest_of(edited) != before[1]


def test_an_edit_of_the_simulator_changes_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All results are measured again."""
    path = tmp_path / "simulator" / "run.py"
    path.parent.mkdir()
    monkeypatch.setattr(source_digest, "ROOT", tmp_path)
    path.write_text("a = 1")
    before = source_digest.source_digest()
    path.write_text("a = 2")
    assert source_digest.source_digest() != before
