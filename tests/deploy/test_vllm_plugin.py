"""The plug-in without vLLM: what is installed of it, how it exports a stand-in scheduler, and its failures."""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import predictor
import services.engine_state
from predictor.config import EngineConfig
from predictor.data_parallel import DataParallelRank, LockstepRules
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.profile import load_profile
from predictor.request import Slo
from predictor.state import CLIENT, MEMORY_SIZE
from predictor.vllm_versions import rules_for
from services.engine_state.identity import short_hash
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, snapshot_from_view
from services.engine_state.view import ENDED, UnreadableError
from services.predictor_server.exported import ExportedEngine
from tests.deploy.installing import PLUGIN, pip_install

ENGINE_STATE, MODEL = Path(services.engine_state.__file__).parent, Path(predictor.__file__).parent
SHARED = ("identity.py", "layout.py", "process.py", "writer.py", "xargs.py")
NUM_BLOCKS, BLOCK_SIZE = 17, 4


XARGS = {
    "block_tag_tokens": 5, "block_tag_spread": "x", "block_ttft_s": 0.25, "block_weight": 3, "block_client_id": "alice",
}  # fmt: skip


class FullAttentionSpec:
    """Has the class name by which the plug-in recognises plain blocks."""


class Queue:
    """A free queue with vLLM's methods."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = list(blocks)

    def popleft(self) -> Any:
        """Take the first block."""
        return self.blocks.pop(0)

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first blocks."""
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        return taken

    def remove(self, block: Any) -> None:
        """Take a block from the middle."""
        self.blocks.remove(block)

    def append(self, block: Any) -> None:
        """Put a block last."""
        self.blocks.append(block)

    def append_n(self, blocks: list[Any]) -> None:
        """Put blocks last."""
        self.blocks += blocks

    def prepend_n(self, blocks: list[Any]) -> None:
        """Put blocks first."""
        self.blocks = [*blocks, *self.blocks]

    def get_all_free_blocks(self) -> list[Any]:
        """Return all blocks, in order."""
        return list(self.blocks)


class Table:
    """The hash table of cached blocks."""

    def insert(self, key: bytes, block: Any) -> None:
        """Cache a block."""
        block.block_hash = key

    def pop(self, key: bytes, block_id: int) -> None:
        """Remove a block."""


class Request(SimpleNamespace):
    """The parts of a request that the plug-in reads; a heap has them in vLLM's order."""

    def __lt__(self, other: Request) -> bool:
        """Compare by priority, arrival and id."""
        mine, theirs = (self.priority, self.arrival_time), (other.priority, other.arrival_time)
        return (*mine, self.request_id) < (*theirs, other.request_id)


class Scheduler:
    """The parts of a scheduler that the plug-in reads; the tests make its steps."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self.scheduler_config = SimpleNamespace(
            policy="fcfs", enable_chunked_prefill=True, async_scheduling=False, long_prefill_token_threshold=0,
            watermark=0.0, scheduler_reserve_full_isl=True,
        )  # fmt: skip
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_size=1),
            model_config=SimpleNamespace(model="tiny"),
            max_concurrent_batches=1,
        )
        self.num_sampled_tokens_per_step, self.num_spec_tokens = 1, 0
        self.max_num_running_reqs = self.max_num_active_reqs = max_num_seqs
        self.max_num_scheduled_tokens, self.max_model_len = 64, 32
        self.block_size = self.hash_block_size = BLOCK_SIZE
        blocks = [SimpleNamespace(block_id=number, block_hash=None) for number in range(NUM_BLOCKS)]
        self.queue = Queue(blocks[1:])
        self.pool = SimpleNamespace(
            num_gpu_blocks=NUM_BLOCKS, blocks=blocks, free_block_queue=self.queue, cached_block_hash_to_block=Table(),
            get_num_free_blocks=lambda: len(self.queue.blocks),
        )  # fmt: skip
        self.kind = SimpleNamespace(
            req_to_blocks=defaultdict(list), num_cached_block={}, kv_cache_spec=FullAttentionSpec(),
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool, coordinator=SimpleNamespace(single_type_managers=[self.kind])
        )
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.kv_holding_waiting: list[Any] = []

    def add(self, name: str, prompt_tokens: int = 6, hashes: tuple[bytes, ...] = ()) -> Any:
        """Add a waiting request."""
        request = Request(
            request_id=f"cmpl-{name}-0-0123abcd", num_prompt_tokens=prompt_tokens, num_tokens=prompt_tokens,
            num_output_tokens=0, num_computed_tokens=0, num_output_placeholders=0, num_in_flight_tokens=0,
            num_stale_output_tokens=0, num_preemptions=0, max_tokens=8, priority=0, arrival_time=time.time(),
            sampling_params=SimpleNamespace(extra_args=XARGS, min_tokens=2),
            status=SimpleNamespace(name="WAITING"), block_hashes=list(hashes), is_prefill_chunk=False,
            spec_token_ids=[],
        )  # fmt: skip
        request.is_finished = lambda: request.status.name.startswith("FINISHED")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def schedule(self) -> Any:
        """Admit all waiting requests with their whole prompts."""
        scheduled = {}
        for request in self.waiting:
            request.status = SimpleNamespace(name="RUNNING")
            held = self.queue.popleft_n(-(-request.num_prompt_tokens // BLOCK_SIZE))
            self.kind.req_to_blocks[request.request_id] = held
            for block, digest in zip(held, request.block_hashes, strict=False):
                self.pool.cached_block_hash_to_block.insert(digest + b"\0\0\0\0", block)
            self.kind.num_cached_block[request.request_id] = len(request.block_hashes)
            scheduled[request.request_id] = request.num_in_flight_tokens = request.num_prompt_tokens
            request.num_computed_tokens = request.num_prompt_tokens
        self.running += self.waiting
        self.waiting = []
        return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens={})

    def update_from_output(self, output: Any, _model_output: Any) -> None:
        """Give every scheduled request one token."""
        for name in output.num_scheduled_tokens:
            if (request := self.requests.get(name)) is not None:
                request.num_in_flight_tokens = 0
                request.num_output_tokens += 1
                request.num_tokens += 1

    def has_unfinished_requests(self) -> bool:
        """Return whether there will be another step."""
        return bool(self.running or self.waiting)

    def finish_requests(self, name: str, status: str) -> None:
        """End a request."""
        request = self.requests.pop(name)
        request.status = SimpleNamespace(name=status)
        self.running = [one for one in self.running if one is not request]
        self.waiting = [one for one in self.waiting if one is not request]
        self.queue.append_n(self.kind.req_to_blocks.pop(name, [])[::-1])

    def shutdown(self) -> str:
        """Return a value that shows the call."""
        return "down"


class OldScheduler(Scheduler):
    """A scheduler of 0.30 or older."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_holding_waiting, self.max_num_active_reqs
        self.skipped_waiting: list[Any] = []


class RenamedScheduler(Scheduler):
    """A scheduler of a version that has another name for its second queue."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_holding_waiting


class HeldBackScheduler(Scheduler):
    """A scheduler of 0.33 that computes prompts in every fourth step, with a connector that Block does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.local_prefill_interval = 4
        self.connector = object()
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.vllm_config.kv_transfer_config = SimpleNamespace(
            kv_connector="LMCacheConnectorV1", kv_role="kv_both", kv_load_failure_policy="fail",
            get_from_extra_config=lambda _, default: default,
        )  # fmt: skip


class CountingScheduler(Scheduler):
    """A scheduler with a rule that counts at most four clients."""

    def __init__(self) -> None:
        super().__init__()
        self.block_planner = SimpleNamespace(
            config=SimpleNamespace(batcher="weighted_vtc", batcher_options={}),
            memory=np.zeros((1, MEMORY_SIZE)),
            clients=np.zeros(0, CLIENT),
            max_clients=4,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the plug-in as its README says, and return where its package is."""
    target = tmp_path_factory.mktemp("site-packages")
    pip_install(PLUGIN, target)
    return target / "block_vllm_export"


@pytest.fixture(scope="module")
def plugin(installed: Path) -> Iterator[ModuleType]:
    """Import the installed plug-in."""
    sys.path.insert(0, str(installed.parent))
    yield importlib.import_module("block_vllm_export")
    sys.path.remove(str(installed.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "block_vllm_export"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def wrapping(plugin: ModuleType) -> ModuleType:
    """The part of the plug-in that derives scheduler classes."""
    return importlib.import_module(f"{plugin.__name__}.wrapping")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the state file; a stand-in `vllm` module has only a version."""
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setenv("BLOCK_STATE_FILE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The plug-in's warnings."""
    caplog.set_level(logging.WARNING, "vllm.block_export")
    return caplog


def test_the_wheel_has_the_writer_of_this_repository(installed: Path) -> None:
    """The files that the sidecar's reader belongs to are built in from their one source, byte for byte."""
    for name in SHARED:
        assert (installed / name).read_bytes() == (ENGINE_STATE / name).read_bytes()
        assert not (PLUGIN / installed.name / name).exists()
    own = {file.name for file in (PLUGIN / installed.name).glob("*.py")}
    assert {file.name for file in installed.glob("*.py")} == own | set(SHARED)
    (information,) = installed.parent.glob("block_vllm_export-*.dist-info")
    assert "block_export = block_vllm_export:register" in (information / "entry_points.txt").read_text()
    requirements = [line for line in (information / "METADATA").read_text().splitlines() if "Requires-Dist" in line]
    assert sorted(requirements) == ["Requires-Dist: numba>=0.61", "Requires-Dist: numpy>=1.26"]


def test_the_wheel_has_the_rules_of_this_repository(installed: Path) -> None:
    """Each module of the engine model in it differs from its one source only in where it imports from."""
    modules = sorted((installed / "predictor").rglob("*.py"))
    for module in modules:
        source = (MODEL / module.relative_to(installed / "predictor")).read_text()
        assert module.read_text().replace("from block_vllm_export.predictor", "from predictor") == source
    for module in installed.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) predictor\b", module.read_text(), re.MULTILINE), module
    rules = {module.name for module in modules if module.parent.name == "batching"}
    assert rules == {module.name for module in (MODEL / "batching").glob("*.py")}
    assert not (PLUGIN / installed.name / "predictor").exists()


def test_the_sdist_can_be_installed_without_the_repository(installed: Path, tmp_path: Path) -> None:
    """An sdist has the shared files in it, and makes the same package."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=PLUGIN, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    pip_install(archive, tmp_path / "target")
    for file in installed.rglob("*.py"):
        copy = tmp_path / "target" / installed.name / file.relative_to(installed)
        assert copy.read_bytes() == file.read_bytes()


def test_a_copy_of_the_plug_in_alone_cannot_be_built(tmp_path: Path) -> None:
    """Without the shared source the build fails, and names the file that is missing."""
    alone = shutil.copytree(PLUGIN, tmp_path / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(build, cwd=alone, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{SHARED[0]}: is missing; build from a checkout of Block" in done.stderr


def test_it_depends_on_nothing_of_ours(installed: Path) -> None:
    """No file of the plug-in imports another package of this project."""
    sources = "".join(file.read_text() for file in installed.rglob("*.py"))
    packages = ("services", "predictor", "protos", "scheduler", "simulator")
    assert not [name for name in packages if f"from {name}" in sources or f"import {name}" in sources]


def test_it_exports_a_scheduler(path: Path, wrapping: ModuleType) -> None:
    """Settings, requests, queues, the step in flight, blocks and outcomes are those of the scheduler."""
    scheduler = wrapping.exporting(Scheduler)()
    reader = Reader(str(path))
    assert config_of(reader.read()) == EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, max_model_len=32,
        enable_prefix_caching=True, enable_chunked_prefill=True, async_scheduling=False, watermark=0.0,
        vllm_version="0.32.0",
    )  # fmt: skip
    first = scheduler.add("first", 6, (b"abcdefgh-first",))
    output = scheduler.schedule()
    snapshot = snapshot_from_view(reader.read(contents=True))
    (live,) = snapshot.running
    assert (live.request.request_id, live.request.prompt_tokens, live.computed_tokens) == (first.request_id, 6, 6)
    assert (live.request.tag.median_tokens, live.request.min_tokens, live.request.weight) == (5, 2, 3.0)
    assert (live.request.slo, live.request.client_id) == (Slo(ttft_s=0.25), "alice")
    assert (live.block_ids, live.full_blocks, live.prefill_tokens) == ((0, 1), 1, 6)
    assert live.request.prefix_hashes == (short_hash(b"abcdefgh"),)
    assert snapshot.steps[0].scheduled == {first.request_id: 6}
    assert snapshot.kv_cache.free_block_ids == tuple(range(2, NUM_BLOCKS - 1))
    assert snapshot.kv_cache.contents == {0: short_hash(b"abcdefgh")}
    scheduler.update_from_output(output, None)
    assert not len(reader.new_steps())  # its end is published with the next step
    scheduler.schedule()
    (step,) = reader.new_steps().tolist()
    assert step[3:7] == (6, 1, 0, 1)
    scheduler.finish_requests(first.request_id, "FINISHED_STOPPED")
    snapshot = snapshot_from_view(reader.read(contents=True))
    assert (snapshot.running, snapshot.steps) == ((), ())
    assert snapshot.kv_cache.free_block_ids == (*range(2, NUM_BLOCKS - 1), 1, 0)
    (outcome,) = reader.new_outcomes()
    assert (int(outcome["output_tokens"]), int(outcome["reason"])) == (1, 0)
    assert scheduler.shutdown() == "down"
    assert not path.exists()


def test_it_exports_what_a_rule_remembers(path: Path, wrapping: ModuleType) -> None:
    """The clients that it counts now, and its numbers, also after the file has grown."""
    scheduler = wrapping.exporting(CountingScheduler)()
    reader = Reader(str(path))
    assert reader.read().clients.size == 0
    planner = scheduler.block_planner
    planner.memory[0, :2] = (3.0, 0.5)
    planner.clients = np.array([(7, 1.0, 40.0, 1, 9, 9, 9.0), (8, 2.0, 2.0**40, 0, 9, 9, 9.0)], CLIENT)
    scheduler.block_export("publish")
    memory = snapshot_from_view(reader.read()).memory
    assert (memory.numbers, memory.correction) == ((3.0, 0.5), 1.0)
    assert [(one.tenant, one.weight, one.tokens, one.waits) for one in memory.clients] == [
        (7, 1.0, 40.0, True), (8, 2.0, 2.0**40, False),
    ]  # fmt: skip
    planner.clients = planner.clients[1:]
    scheduler.add("first")
    scheduler.schedule()
    assert [one.tenant for one in snapshot_from_view(reader.read()).memory.clients] == [8]
    for number in range(200):  # more than there were slots
        scheduler.add(f"more{number}")
    scheduler.block_export("publish")
    assert [one.tenant for one in snapshot_from_view(reader.read()).memory.clients] == [8]
    scheduler.shutdown()


def test_a_sidecar_reads_it(path: Path, wrapping: ModuleType) -> None:
    """The sidecar's model has the scheduler's state and contents of blocks, also after the file has grown."""
    scheduler = wrapping.exporting(Scheduler)()
    sidecar = ExportedEngine(str(path), load_profile("constant"), DEFAULT_RESIDUAL, 60.0)
    scheduler.add("first", 6, (b"abcdefgh-first",))
    scheduler.schedule()
    assert sidecar.refresh().engine.tracks_blocks
    assert list(sidecar.take_shown()) == ["first"]
    for number in range(200):  # more than there were slots
        scheduler.add(f"more{number}")
    scheduler.block_export("publish")
    sidecar.refresh()
    assert {f"more{number}" for number in range(200)} <= set(sidecar.take_shown())
    sidecar.close()
    scheduler.shutdown()


def test_a_step_whose_outputs_never_come_is_dropped(path: Path, wrapping: ModuleType) -> None:
    """When the outputs of a later step arrive, an earlier one is no longer in flight."""
    scheduler = wrapping.exporting(Scheduler)()
    reader = Reader(str(path))
    scheduler.add("lost")
    scheduler.schedule()
    scheduler.add("taken")
    output = scheduler.schedule()
    assert len(reader.read().steps) == 2
    scheduler.update_from_output(output, None)
    scheduler.schedule()
    assert reader.read().steps == ()
    assert len(reader.new_steps()) == 1
    scheduler.shutdown()


def test_the_order_of_reuse_is_exported(path: Path, wrapping: ModuleType) -> None:
    """Blocks that are added at either end, or removed from the middle, are exported in the queue's order."""
    scheduler = wrapping.exporting(Scheduler)()
    queue, reader = scheduler.queue, Reader(str(path))
    taken = [queue.popleft(), *queue.popleft_n(3)]
    queue.prepend_n(taken[2:])
    queue.append(taken[0])
    queue.remove(queue.blocks[4])
    queue.prepend_n(taken[1:2])
    scheduler.block_export("publish")
    contents = snapshot_from_view(reader.read(contents=True)).kv_cache
    assert contents.free_block_ids == tuple(block.block_id - 1 for block in queue.blocks)
    scheduler.shutdown()


def test_a_cache_that_is_reset_is_exported_as_empty(path: Path, wrapping: ModuleType) -> None:
    """When the pool creates a new hash table, all contents are dropped, and the new table is followed."""
    scheduler = wrapping.exporting(Scheduler)()
    scheduler.pool.cached_block_hash_to_block.insert(b"12345678....", scheduler.pool.blocks[3])
    scheduler.block_export("publish")
    reader = Reader(str(path))
    assert snapshot_from_view(reader.read(contents=True)).kv_cache.contents == {2: short_hash(b"12345678")}
    scheduler.pool.cached_block_hash_to_block = Table()
    scheduler.pool.blocks[3].block_hash = None
    scheduler.block_export("publish")
    assert snapshot_from_view(reader.read(contents=True)).kv_cache.contents == {}
    scheduler.pool.cached_block_hash_to_block.insert(b"87654321....", scheduler.pool.blocks[4])
    scheduler.block_export("publish")
    assert snapshot_from_view(reader.read(contents=True)).kv_cache.contents == {3: short_hash(b"87654321")}
    scheduler.shutdown()


@pytest.mark.parametrize("broken", ["running", "queue"])
def test_a_failure_is_logged_once_and_the_engine_continues(
    path: Path, wrapping: ModuleType, warnings: pytest.LogCaptureFixture, broken: str
) -> None:
    """After any failure the scheduler's results are unchanged, and sidecars see that the file is closed."""
    scheduler = wrapping.exporting(Scheduler)()
    reader = Reader(str(path))
    reader.read()
    request = scheduler.add("first")
    if broken == "running":
        del request.arrival_time
    else:
        scheduler.queue.append_n([SimpleNamespace(block_id="none")])
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, None)
    assert request.num_output_tokens == 1
    assert len(warnings.records) == 1
    assert "the engine continues" in warnings.records[0].message
    with pytest.raises(UnreadableError) as refusal:
        reader.read()
    assert refusal.value.reason == ENDED


@pytest.mark.parametrize(
    ("name", "value"), [("num_spec_tokens", 2), ("num_sampled_tokens_per_step", 0), ("max_concurrent_batches", 3)]
)
def test_unsupported_engines_are_left_alone(
    path: Path, wrapping: ModuleType, warnings: pytest.LogCaptureFixture, name: str, value: int
) -> None:
    """With drafts of a method that is not modelled, pooling or deep pipelines it logs the reason, and exports nothing."""

    class Other(Scheduler):
        """A scheduler that is not supported."""

        def __init__(self) -> None:
            super().__init__()
            self.vllm_config.speculative_config = SimpleNamespace(method="dflash")
            setattr(self.vllm_config if name.startswith("max") else self, name, value)

    scheduler = wrapping.exporting(Other)()
    scheduler.add("first")
    scheduler.schedule()
    assert not path.exists()
    assert "not supported" in warnings.text


def test_the_engine_starts_without_its_state_file(
    path: Path, wrapping: ModuleType, warnings: pytest.LogCaptureFixture
) -> None:
    """Where the file cannot be created, the engine starts nevertheless."""
    path.write_text("something else")
    scheduler = wrapping.exporting(Scheduler)()
    scheduler.add("first")
    assert scheduler.schedule().num_scheduled_tokens
    assert path.read_text() == "something else"
    assert "cannot start" in warnings.text


def test_any_scheduler_class_stays_in_charge(wrapping: ModuleType) -> None:
    """The configured class is the base class, and is wrapped only once."""

    class Config:
        """A configuration with a scheduler class."""

        def get_scheduler_cls(self) -> type:
            """Return the user's class."""
            return Scheduler

    wrapping.wrap_scheduler_choice(Config)
    wrapping.wrap_scheduler_choice(Config)
    chosen = Config().get_scheduler_cls()
    assert chosen.__mro__[1] is Scheduler
    assert chosen is Config().get_scheduler_cls()
    assert chosen.__name__ == "Scheduler"


def test_ranks_in_lockstep_are_named_in_the_file(plugin: ModuleType) -> None:
    """Those of a model with experts have the rules of their version; ranks of other models, and one rank, none."""
    settings = importlib.import_module(f"{plugin.__name__}.settings")
    parallel = SimpleNamespace(
        data_parallel_index=1, data_parallel_size=4, data_parallel_master_ip="10.0.0.1", data_parallel_master_port=29550
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=True))
    early = DataParallelRank.from_table(settings.rank_settings(config)["data_parallel"])
    assert early.lockstep == LockstepRules(sync_interval=32, syncs_first_step=False)
    parallel.dp_sync_interval = 8
    late = DataParallelRank.from_table(settings.rank_settings(config)["data_parallel"])
    assert late == DataParallelRank(
        rank=1, size=4, group="10.0.0.1:29550", lockstep=LockstepRules(sync_interval=8, syncs_first_step=True)
    )
    config.model_config.is_moe = False
    assert DataParallelRank.from_table(settings.rank_settings(config)["data_parallel"]).lockstep is None
    parallel.data_parallel_size = 1
    assert settings.rank_settings(config) == {}


def test_what_is_not_modelled_is_named_in_the_file(path: Path, wrapping: ModuleType) -> None:
    """Each forecast of the sidecar says it."""
    scheduler = wrapping.exporting(HeldBackScheduler)()
    names = [
        "prefill_schedule_interval 4", f"scheduler_cls {__name__}.HeldBackScheduler",
        "kv_connector LMCacheConnectorV1",
    ]  # fmt: skip
    assert Reader(str(path)).read().settings["not_modelled"] == names
    sidecar = ExportedEngine(str(path), load_profile("constant"), DEFAULT_RESIDUAL, 60.0)
    assert sidecar.refresh().approximations == tuple(f"the engine has {name}, which is not modelled" for name in names)
    sidecar.close()
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("interval", "ranks", "is_moe", "local", "expected"),
    [(4, 1, False, None, 1), (4, 2, True, None, 4), (4, 2, True, 1, 4), (4, 1, False, 4, 4), (None, 2, True, None, 1)],
)
def test_prefills_are_held_back_by_ranks_in_lockstep_and_since_0_33_by_all(
    plugin: ModuleType, *, interval: int | None, ranks: int, is_moe: bool, local: int | None, expected: int
) -> None:
    """Without data parallelism, versions before 0.33 have the setting and ignore it."""
    settings = importlib.import_module(f"{plugin.__name__}.settings")
    scheduler = SimpleNamespace(
        scheduler_config=SimpleNamespace(**({"prefill_schedule_interval": interval} if interval else {})),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=ranks), model_config=SimpleNamespace(is_moe=is_moe)
        ),
        **({"local_prefill_interval": local} if local else {}),
    )
    assert settings.prefill_interval(scheduler) == expected


def test_each_data_parallel_rank_has_its_file(path: Path, plugin: ModuleType) -> None:
    """The first writes to the configured path, the others beside it."""
    state_file = importlib.import_module(f"{plugin.__name__}.settings").state_file
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0))
    scheduler = SimpleNamespace(vllm_config=config)
    assert state_file(scheduler) == str(path)
    config.parallel_config.data_parallel_index = 3
    assert state_file(scheduler) == str(path.with_name("state-dp3"))


@pytest.mark.parametrize(
    ("version", "shown", "rules"),
    [
        ("0.28.0", "0.28.0", ""), ("0.30.1+cpu", "0.30.1+cpu", ""), ("0.33.0", "0.33.0", ""),
        ("0.34.0", "0.34.0", "0.33"), ("0.27.2", "0.27.2", "0.28"), ("dev", "0.33", "0.33"),
    ],
)  # fmt: skip
def test_each_version_is_exported(
    path: Path, wrapping: ModuleType, warnings: pytest.LogCaptureFixture, version: str, shown: str, rules: str
) -> None:
    """Of a version that is not known one line is logged: it is forecast by the nearest rules."""
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    scheduler = wrapping.exporting(OldScheduler if version < "0.31" else Scheduler)()
    config = config_of(Reader(str(path)).read())
    assert config.vllm_version == shown
    assert rules_for(config.vllm_version).is_exact == (rules == "" or version == "dev")
    assert [one.getMessage() for one in warnings.records] == (
        [f"block-vllm-export: vLLM {version} is not known; its state is exported, and forecast by the rules of {rules}"]
        if rules
        else []
    )
    scheduler.shutdown()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_skipped_requests_of_an_old_version_are_exported_where_it_tries_them(
    path: Path, wrapping: ModuleType, policy: str
) -> None:
    """Until 0.30 they are first, or with priorities among the others; they may hold blocks."""
    sys.modules["vllm"].__version__ = "0.30.0"  # type: ignore[attr-defined]
    scheduler = wrapping.exporting(OldScheduler)()
    scheduler.scheduler_config.policy = policy
    names = [scheduler.add(name).request_id for name in "abc"]
    late = scheduler.waiting.pop(1)
    late.num_computed_tokens = 4
    scheduler.kind.req_to_blocks[late.request_id] = scheduler.queue.popleft_n(1)
    scheduler.skipped_waiting.append(late)
    scheduler.block_export("publish")
    snapshot = snapshot_from_view(Reader(str(path)).read(contents=True))
    expected = names if policy == "priority" else [names[1], names[0], names[2]]
    assert [one.request.request_id for one in snapshot.waiting] == expected
    assert [one.num_blocks for one in snapshot.waiting] == [int(name == names[1]) for name in expected]
    scheduler.shutdown()


def test_a_scheduler_with_other_names_is_not_exported(
    path: Path, wrapping: ModuleType, warnings: pytest.LogCaptureFixture
) -> None:
    """One line says what is missing, no file is left, and the engine runs."""
    sys.modules["vllm"].__version__ = "0.35.0"  # type: ignore[attr-defined]
    scheduler = wrapping.exporting(RenamedScheduler)()
    (record,) = warnings.records
    assert record.getMessage().startswith("block-vllm-export: vLLM 0.35.0 differs: ")
    assert "kv_holding_waiting" in record.getMessage()
    assert record.getMessage().endswith("; nothing is exported")
    assert record.exc_info is None
    scheduler.add("first")
    assert scheduler.schedule().num_scheduled_tokens
    with pytest.raises(UnreadableError):
        Reader(str(path)).read()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.34.0", "dev"])
def test_batching_rules_need_a_version_that_they_were_compared_with(plugin: ModuleType, version: str) -> None:
    """The engine does not start, and one line says which version would do."""
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    require = importlib.import_module(f"{plugin.__name__}.rule_settings").require_carried_out
    with pytest.raises(ValueError, match=rf"^vLLM {version} is not supported with a batching rule, only 0\.32$"):
        require(Scheduler())


@pytest.mark.usefixtures("path")
def test_it_can_be_switched_off(
    plugin: ModuleType, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BLOCK_EXPORT=0 it does nothing, not even a version check."""
    monkeypatch.setenv("BLOCK_EXPORT", "0")
    sys.modules["vllm"].__version__ = "0.1"  # type: ignore[attr-defined]
    plugin.register()
    assert not warnings.records


class AgentConfig:
    """NIXL's configuration of an agent, as its bindings have it."""

    def __init__(self) -> None:
        self._delay_us = 0

    @property
    def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
        """The pause of the progress thread, in microseconds."""
        return self._delay_us

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:  # noqa: N802
        self._delay_us = value


class CpuPlatform:
    """vLLM's platform, which names the cores that a worker binds itself to."""

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Name a core."""
        return [[1]]


@pytest.mark.parametrize("asked", ["1", "0", ""])
def test_nixl_can_share_few_cores(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """On request, NIXL's progress thread sleeps although NIXL sets no pause, and no worker is bound to one core."""
    bindings, cpu = ModuleType("nixl_cu12._bindings"), ModuleType("vllm.platforms.cpu")
    platform = type("CpuPlatform", (CpuPlatform,), {})
    bindings.nixlAgentConfig, cpu.CpuPlatform = AgentConfig, platform  # type: ignore[attr-defined]
    nixl = importlib.import_module(f"{plugin.__name__}.nixl_on_cpu")
    monkeypatch.setattr(nixl, "BINDINGS", (bindings.__name__,))
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: name)
    for module in (bindings, cpu):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("vllm.platforms", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setenv("BLOCK_NIXL_ON_CPU", asked)
    monkeypatch.setenv("BLOCK_EXPORT", "0")
    plugin.register()
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == (nixl.POLL_US if asked == "1" else 0)
    assert platform.discover_numa_topology() == ([] if asked == "1" else [[1]])
