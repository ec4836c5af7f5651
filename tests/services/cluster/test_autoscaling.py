"""`block up --provision`: a cluster grows under load and shrinks again, no request fails, no process is left."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from protos.block.v1 import common_pb2, provisioner_pb2_grpc
from protos.block.v1 import provisioner_pb2 as pb
from services.cluster.instance_range import InstanceRange, engine_capacity_of, instance_range_from
from services.cluster.settings import ClusterSettings, VllmSettings, settings_from_file
from tests.services.cluster.loading import loaded
from tests.services.waiting import PATIENCE_S, run, until

pytestmark = pytest.mark.xdist_group("cluster")  # one at a time: each starts a dozen processes

LONG_S = 240.0  # for several processes to start, one after the other
TABLES = """
[cluster]
port = 0
[provisioner]
min-instances = 2
max-instances = 5
cooldown-s = 1.0
calm-s = 10.0
cold-start-s = 5.0
threshold-s = 3.0
tick-s = 0.5
settle-s = 1.5
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
speed = 2.0
max-num-seqs = 8
max-model-len = 512
num-gpu-blocks = 257
drain-s = 60.0
[predictor]
stall-s = 60.0
[tagger]
estimator = "constant"
constant-tokens = 60.0
[scheduler]
poll-s = 0.2
sidecar-deadline-ms = 10000
tagger-deadline-ms = 10000
[gateway]
schedule-s = 20.0
first-byte-s = 120.0
idle-s = 60.0
"""


@contextmanager
def up(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the command while the block runs; its output goes to a file."""
    file, output = folder / "cluster.toml", folder / "output"
    file.write_text(TABLES)
    block = str(Path(sys.executable).with_name("block"))
    with output.open("wb") as out, subprocess.Popen([block, "up", "-c", str(file)], stderr=out) as process:
        try:
            yield process, output
        finally:
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()


def found_in(process: subprocess.Popen[bytes], output: Path, pattern: str) -> str:
    """Find a pattern in the output so far."""
    text = output.read_text(errors="replace")
    assert process.poll() is None, text
    found = re.search(pattern, text)
    return found.group(1) if found else ""


@pytest.mark.slow
def test_a_burst_makes_a_whole_cluster_grow_and_it_shrinks_again(tmp_path: Path) -> None:
    """It grows from two instances to five and shrinks to two; Ctrl-C stops the started engines as well."""

    async def test() -> None:
        with up(tmp_path) as (process, output):
            await until(lambda: bool(found_in(process, output, r"block: (http://\S+)/v1")), LONG_S, "a gateway")
            url = found_in(process, output, r"block: (http://\S+)/v1")
            address = r"provisioner: block provision status --address (\S+)"
            await until(lambda: bool(found_in(process, output, address)), LONG_S, "the provisioner's address")
            async with grpc.aio.insecure_channel(found_in(process, output, address)) as channel:
                stub = provisioner_pb2_grpc.ProvisionerStub(channel)

                async def pool() -> pb.PoolStatus:
                    return (await stub.Status(pb.StatusRequest(), timeout=30)).pools[0]

                async def has(num: int) -> bool:
                    states = [one.state for one in (await pool()).instances]
                    return states == [common_pb2.INSTANCE_STATE_READY] * num

                await until(partial(has, 2), LONG_S, "two instances")
                async with loaded(url, clients=90, output_tokens=60, most=100_000) as load:
                    await until(partial(has, 5), LONG_S, "five instances")
                async with loaded(url, clients=1, output_tokens=60, most=100_000) as quiet:
                    await until(partial(has, 2), LONG_S, "two instances again")
                assert load.failures() + quiet.failures() == []
                assert load.served_since(0) > 0
                actions = [entry.action async for entry in stub.History(pb.HistoryRequest(), timeout=30)]
                assert all(action.why for action in actions)
                engines = [one.engine_url for one in (await pool()).instances]
            process.send_signal(signal.SIGINT)
            await until(lambda: process.poll() is not None, LONG_S, "the end")
            assert process.returncode == 0, output.read_text()
        assert len(engines) == 2
        for engine in engines:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(engine.rpartition(":")[2]))).close()

    run(test, limit_s=4 * LONG_S)


@pytest.mark.parametrize("text", ["5", "5-2", "0-2", "2-257", "two-five", "2-", "2-5-7"])
def test_bad_ranges_are_refused(text: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match="^provision: "):
        instance_range_from(text)


def test_a_provisioner_goes_with_engines_that_it_can_start() -> None:
    """It cannot start vLLM, which needs devices, nor mirrored engines."""
    for settings in ({"vllm": VllmSettings(model="m")}, {"mirror": True}):
        with pytest.raises(ValueError, match="^provision: "):
            ClusterSettings(provision="1-2", **settings)


def test_a_table_with_a_maximum_starts_a_provisioner(tmp_path: Path) -> None:
    """It has the capacity of engines from their table, unless [provisioner] sets it; [cluster] takes precedence."""
    file = tmp_path / "cluster.toml"
    file.write_text(TABLES)
    given = settings_from_file(str(file))
    assert ClusterSettings(**given).instance_range == InstanceRange(minimum=2, maximum=5)
    assert given["capacity"] == {"seats": 8, "kv_tokens": 257 * 16}
    file.write_text(TABLES.replace("[cluster]", "[cluster]\nprovision = '1-3'").replace("tick-s", "seats = 4\ntick-s"))
    given = settings_from_file(str(file))
    assert ClusterSettings(**given).instance_range == InstanceRange(minimum=1, maximum=3)
    assert "seats" not in given["capacity"]
    file.write_text("[provisioner]\n")
    assert ClusterSettings(**settings_from_file(str(file))).instance_range is None


def test_capacity_is_read_from_the_table_of_engines() -> None:
    """What the table leaves out is unknown."""
    assert engine_capacity_of({}) == {}
    assert engine_capacity_of({"num_gpu_blocks": 10, "block-size": 32}) == {"kv_tokens": 320}
