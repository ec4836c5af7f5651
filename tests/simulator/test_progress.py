"""Loops that report how far they are."""

from __future__ import annotations

from pathlib import Path

from simulator.codec import requests_from_file
from simulator.progress import EVERY, followed, followed_by


def test_items_pass_unchanged_and_are_counted() -> None:
    """From nothing done to all of them; with a size, by their sizes."""
    seen: list[tuple[str, int, int]] = []
    with followed_by(lambda *one: seen.append(one)):
        assert list(followed(range(EVERY + 1), "counting", EVERY + 1)) == list(range(EVERY + 1))
        assert "".join(followed(["a", "bc"], "reading", 3, size=len)) == "abc"
    assert seen == [
        ("counting", 0, EVERY + 1), ("counting", EVERY, EVERY + 1), ("counting", EVERY + 1, EVERY + 1),
        ("reading", 0, 3), ("reading", 3, 3),
    ]  # fmt: skip


def test_without_a_follower_there_is_no_loop_around_the_loop() -> None:
    """The items themselves are returned, also after a block with a follower has ended."""
    items = [1, 2]
    assert followed(items, "counting") is items
    with followed_by(lambda *_: None):
        assert followed(items, "counting") is not items
    assert followed(items, "counting") is items


def test_files_are_read_alike_with_a_follower(tmp_path: Path) -> None:
    """JSON lines and CSV."""
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text("".join(f'{{"prompt_tokens": {n}, "output_tokens": 2}}\n' for n in range(1, 30)))
    table.write_text("prompt_tokens,output_tokens\n" + "".join(f"{n},2\n" for n in range(1, 30)))
    for file in (lines, table):
        alone = requests_from_file(str(file), block_size=16)
        done: list[int] = []
        with followed_by(lambda _, at, __, done=done: done.append(at)):
            assert requests_from_file(str(file), block_size=16) == alone
        assert done == [0, 29]
