"""Seeds and some inputs for every target of the fuzzer; and that the fuzzer finds what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from scripts.fuzz import TARGETS, FuzzOutcome, _audited, _made, _opened, _tried, supervised
from scripts.fuzzing.inputs import halves, mutated
from scripts.fuzzing.parsers import Parser
from scripts.fuzzing.targets import SEEDS, seeds_of

FEW = {"state_file": 60, "grpc": 60, "ext_proc": 60, "sse": 60, "http_body": 80, "http_head": 80}


async def fed(name: str, num: int) -> FuzzOutcome:
    """Feed the seeds and some inputs to a target in this process."""
    outcome, seeds = FuzzOutcome(target=name, seed=1), seeds_of(name)
    async with _opened(name) as target:
        for data in seeds:
            await _tried(target, outcome, data, -1)
        for index in range(num):
            await _tried(target, outcome, await _made(target, name, 1, index, seeds), index)
        await _audited(target, outcome, num)
    return outcome


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_and_some_inputs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Former findings stay fixed, and some new inputs find nothing."""
    monkeypatch.setattr("scripts.fuzz.FINDINGS", tmp_path)
    assert asyncio.run(fed(name, FEW.get(name, 150))).found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_more_inputs(name: str) -> None:
    """Some thousand inputs find nothing either, in a process as they run by hand."""
    assert supervised(name, seed=2, num=4000).found == []


def test_all_seeds_belong_to_a_target() -> None:
    """No folder of seeds is left over, and no seed is large."""
    assert {path.name for path in SEEDS.iterdir()} <= set(TARGETS)
    assert all(path.stat().st_size < 2**16 for path in SEEDS.glob("*/*"))


def test_a_finding_is_kept_small_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader that fails in a way that is not declared is found, its input is made smaller, and it is reported once."""
    monkeypatch.setattr("scripts.fuzz.FINDINGS", tmp_path)

    def read(data: bytes) -> None:
        if b"x" in data:
            raise LookupError("a reader that is wrong")
        if b"y" in data:
            raise ValueError("declared")

    target = Parser(name="toml", draw=lambda draw: draw.randbytes(50), read=read, valid=b"")
    outcome = FuzzOutcome(target="toml", seed=0)

    async def test() -> None:
        for data in (b"aaaaaaaaaaaaxbbbbbbb", b"y", b"ok", b"zzzxzzz"):
            await _tried(target, outcome, data, 3)

    asyncio.run(test())
    (found,) = outcome.found
    assert (found.num, found.index) == (2, 3)
    assert Path(found.file).read_bytes() == b"x"
    assert found.kind.startswith("LookupError")


def test_inputs_repeat_by_seed_and_index() -> None:
    """The same seed and index make the same input, others another one."""

    async def test() -> None:
        async with _opened("kv_params") as target:
            made = [
                await _made(target, "kv_params", seed, index, []) for seed, index in ((1, 1), (1, 1), (1, 2), (2, 1))
            ]
        assert made[0] == made[1]
        assert len(set(made)) == 3

    asyncio.run(test())
    assert mutated(Random(1), b"abc") == mutated(Random(1), b"abc")
    assert halves(b"abcd")[:2] == [b"cd", b"ab"]
