"""Changes of the list of instances."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.instances.sources import FromFile
from tests.services.scheduler_server.running import (
    LAST_RESORT,
    ChangingSource,
    run,
    scheduler,
    until,
    until_reported,
    until_seen,
)
from tests.services.stub_sidecars import StubSidecar, sidecars


def test_changes_of_the_file_of_instances_take_effect(tmp_path: Path) -> None:
    """A new instance is used, a removed one is not, a draining one only as last resort; a bad list changes nothing."""
    path = tmp_path / "instances.json"

    def write(*stubs: StubSidecar, **extra: Any) -> None:
        tables = [
            {
                "instance_id": stub.name,
                "engine_url": stub.engine_url,
                "sidecar_address": f"127.0.0.1:{stub.port}",
                "models": ["m"],
                **extra,
            }
            for stub in stubs
        ]
        new = path.with_suffix(".new")
        new.write_text(json.dumps(tables))
        new.rename(path)

    async def test() -> None:
        async with sidecars("a", "b") as stubs:
            write(stubs[0])
            async with scheduler(FromFile(str(path))) as client:
                assert await client.choose() == "a"
                stubs[1].e2e_s = 1.0
                write(*stubs)
                await until(lambda: client.count("block_instances") == 2)
                assert await client.choose() == "b"
                write(stubs[0], engine_url="nonsense")
                write(stubs[1])
                await until(lambda: client.count("block_instances") == 1)
                assert await client.choose() == "b"
                write(stubs[1], state="draining")
                while (await client.decide()).basis != LAST_RESORT:
                    await asyncio.sleep(0.005)

    run(test)


def test_a_change_of_tiers_takes_effect_and_nothing_else_of_an_instance_is_forgotten() -> None:
    """Policies read the new tier at once; the connections to the sidecars go on, with what they reported."""

    async def test() -> None:
        source = ChangingSource()
        async with sidecars("a", "b") as stubs:
            source.instances = [stub.instance for stub in stubs]
            async with scheduler(source, policy='jsq: filter = "tier_tpot_s < 1 and tier_closed < 1"') as client:
                stubs[1].update_load(num_running=9)
                await until(lambda: all(stub.num_watched == 1 for stub in stubs))
                while await client.choose() != "a":  # until it has the report
                    await asyncio.sleep(0.005)

                def place(**tpot_slo_s: float) -> None:
                    source.instances = [
                        replace(stub.instance, tier=stub.name, tier_tpot_s=tpot_slo_s[stub.name]) for stub in stubs
                    ]

                for moved, name in (({"a": math.inf, "b": 0.05}, "b"), ({"a": 0.05, "b": 0.05}, "a")):
                    place(**moved)
                    while (decision := await client.decide()).instance.instance_id != name:
                        await asyncio.sleep(0.005)
                    told = decision.instance
                    assert (told.tier, told.tier_tpot_s, told.tier_closed) == (name, 0.05, False)
                source.instances = [
                    replace(stub.instance, tier_tpot_s=0.05, tier_closed=stub.name == "a") for stub in stubs
                ]
                while await client.choose() != "b":
                    await asyncio.sleep(0.005)
                assert [stub.num_watched for stub in stubs] == [1, 1]

    run(test)


def test_what_another_scheduler_has_released_is_reserved_no_longer() -> None:
    """A report contains what has changed since the last one, which need not be all that a reply said in between."""

    async def test() -> None:
        async with sidecars("a", reports_changes=True) as stubs, scheduler(stubs, policy="jsq") as client:
            await until_reported(client, stubs)
            await client.decide()
            await until_seen(client, lambda known: known["a"].num_reserved == 1)
            stubs[0].held.clear()
            stubs[0].update_load()
            await until_seen(client, lambda known: known["a"].num_reserved == 0)

    run(test)


def test_a_bad_file_at_the_start_is_refused(tmp_path: Path) -> None:
    """There is no earlier list to keep."""

    async def test() -> None:
        with pytest.raises(ValueError, match=r"missing\.toml: cannot be read"):
            async with scheduler(FromFile(str(tmp_path / "missing.toml"))):
                pass

    run(test)
