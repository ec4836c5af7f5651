"""Changes of the list of instances."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.instances import FromFile
from tests.services.scheduler_server.running import LAST_RESORT, run, scheduler, until
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


def test_a_bad_file_at_the_start_is_refused(tmp_path: Path) -> None:
    """There is no earlier list to keep."""

    async def test() -> None:
        with pytest.raises(ValueError, match=r"missing\.toml: cannot be read"):
            async with scheduler(FromFile(str(tmp_path / "missing.toml"))):
                pass

    run(test)
