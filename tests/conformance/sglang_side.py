"""Runs in a process with torch and SGLang's source: the plain oracle beside one that admits by SGLang's own classes.

`PrefillAdder`, `AddReqResult` and `PrefillBudget` are SGLang's; its modules for GPUs are replaced by empty ones. The
queues, the pool of pages and the event loop are the oracle's. Prints a JSON object with what was compared.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import random
import sys
import types
from contextlib import suppress
from itertools import islice, zip_longest
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from tests.oracle import sglang as oracle

REAL = ("managers.schedule_policy", "mem_cache.radix_cache", "mem_cache.prefill_budget", "mem_cache.base_prefix_cache",
        "mem_cache.evict_policy", "mem_cache.cache_init_params", "mem_cache.utils", "mem_cache.common",
        "mem_cache.events", "mem_cache.allocator.base", "environ")  # fmt: skip
PACKAGES = ("", ".managers", ".mem_cache", ".mem_cache.allocator")
MAX_STEPS = 300


class _EmptyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper()
        value = _EmptyType(name, (), {"__init__": lambda *_, **__: None}) if is_class else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source: str) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name.partition(".")[0] not in ("sglang", "triton", "sgl_kernel", "zmq", "orjson"):
            return None
        if name.removeprefix("sglang.srt.") in REAL:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        is_package = spec.name in ("sglang", *(f"sglang.srt{package}" for package in PACKAGES))
        module.__path__ = [f"{self.source}/{spec.name.replace('.', '/')}"] if is_package else []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


def load_policy(source: str) -> Any:
    """Import SGLang's `schedule_policy`, without what only other models, ranks and GPUs need."""
    sys.meta_path.insert(0, _Finder(source))
    schedule_policy: Any = importlib.import_module("sglang.srt.managers.schedule_policy")

    off = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    schedule_policy._use_exact_chunk_fill = lambda: False
    schedule_policy._IS_HIP = False
    schedule_policy.get_exec = lambda: SimpleNamespace(features=off)
    schedule_policy.get_context = lambda: SimpleNamespace(is_config_namespace_published=lambda _: False)
    schedule_policy.page_interleave_shard_size = lambda _: 1
    schedule_policy.split_cached_prefix_by_tier = lambda **_: (0, 0, 0)
    return schedule_policy


class Tree:
    """What the adder asks of the prefix cache; a node is the list of a prefix's pages."""

    buffer_pipeline = None

    def __init__(self, pool: oracle.Pool, page: int) -> None:
        self.pool, self.page, self.disable = pool, page, pool.disabled
        self.locked: list[Any] = []

    def supports_mamba(self) -> bool:
        """It has no state of other models."""
        return False

    def supports_prefix_sharing(self) -> bool:
        """Requests share pages."""
        return True

    def evictable_size(self) -> int:
        """Return the cached tokens that no request locks."""
        locked = {key for node in self.locked for key in node}
        return sum(key not in locked for key in self.pool.evictable) * self.page

    def lock(self, node: Any) -> Any:
        """Lock a prefix."""
        self.locked.append(node)
        return node

    def unlock(self, node: Any) -> None:
        """Unlock a prefix."""
        self.locked.remove(node)

    def finish_storage_prefetch_admission(self, *_: Any, **__: Any) -> None:
        """Account for nothing."""

    discard_storage_prefetch_accounting = finish_storage_prefetch_admission


class Allocator:
    """What the adder asks of the pool."""

    def __init__(self, pool: oracle.Pool, page: int) -> None:
        self.pool, self.page_size = pool, page

    def available_size(self) -> int:
        """Return the free tokens."""
        return self.pool.free * self.page_size

    def create_prefill_budget(self, tree: Tree, *, num_mixed_decode_tokens: int = 0) -> Any:
        """Return SGLang's own budget."""
        module: Any = importlib.import_module("sglang.srt.mem_cache.prefill_budget")
        return module.PrefillBudget(self, tree, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_: Any) -> int:
        """Reserve nothing for a request itself."""
        return 0


class Req:
    """A request as the adder reads it."""

    host_hit_length = swa_host_hit_length = auxiliary_swa_host_hit_length = mamba_host_hit_length = 0
    storage_hit_length = storage_hit_start = host_loaded_length = 0
    host_hit_is_storage = retracted_stain = False
    cache_request_handle = lock = None

    def __init__(self, request: oracle.Request, last_node: Any = None) -> None:
        self.rid = request.id
        self.sampling_params = SimpleNamespace(max_new_tokens=request.max_tokens, ignore_eos=False)
        self.output_ids = range(request.output)
        self.full_untruncated_fill_ids = range(request.fill)
        self.prefix_len = self.extend_end = request.prefix_len
        self.last_node = last_node
        self.kv = SimpleNamespace(req_pool_idx=None, holds_mamba=False)

    @property
    def extend_len(self) -> int:
        """Return the tokens of this prefill."""
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        """Nothing is in host memory."""
        return False

    def materialized_host_hit_len(self) -> int:
        """Nothing is in host memory."""
        return 0

    def fulfilled_storage_hit_len(self, _: int) -> int:
        """Nothing is in storage."""
        return 0


def scheduler_with(policy: Any) -> type[oracle.Scheduler]:
    """Return the oracle whose admission is SGLang's `PrefillAdder`."""
    results = {
        policy.AddReqResult.CONTINUE: "continue",
        policy.AddReqResult.NO_TOKEN: "no token",
        policy.AddReqResult.OTHER: "other",
    }

    class Scheduler(oracle.Scheduler):
        def begin_prefill(self) -> None:
            chunking = self.settings["enable_chunked_prefill"]
            limit = self.options["max_prefill_tokens"] if chunking else self.settings["max_num_batched_tokens"]
            policy.CLIP_MAX_NEW_TOKENS = self.clip
            self.adder = policy.PrefillAdder(
                self.page, Tree(self.pool, self.page), Allocator(self.pool, self.page),
                SimpleNamespace(reqs=[Req(request) for request in self.running]), self.ratio, int(limit),
                self.settings["max_num_batched_tokens"] if chunking else None,
                len(self.running) if self.mixes else 0,
            )  # fmt: skip
            self.can_run = []

        def budget_state(self) -> str:
            return results[self.adder.budget_state()]

        def add_chunked(self, request: oracle.Request) -> bool:
            req = Req(request)
            left = self.adder.add_chunked_req(req)
            self.can_run.append((request, req.extend_len))
            return left is not None

        def add_one(self, request: oracle.Request) -> tuple[str, bool]:
            keys = self.pool.match(request, (request.fill - 1) // self.page)
            request.prefix_len = len(keys) * self.page
            req = Req(request, keys)
            result = self.adder.add_one_req(req, self.chunked is not None, None)
            if self.adder.can_run_list and self.adder.can_run_list[-1] is req:
                self.pool.lock(keys)
                request.keys = keys
                self.can_run.append((request, req.extend_len))
            return results[result], self.adder.new_chunked_req is req

    return Scheduler


def draw_load(draw: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw an engine's settings, and requests that fit into it."""
    page, seats = draw.choice((1, 1, 2, 4, 16)), draw.randint(1, 8)
    chunking = draw.random() < 0.7
    longest = page * draw.randint(4, 20)
    options = {
        "schedule_conservativeness": draw.choice((0.1, 1.0, 2.0)), "longest_prefix_match": float(draw.random() < 0.5),
        "max_prefill_tokens": draw.choice((8.0, 64.0, 16384.0)), "mixed_chunk": float(draw.random() < 0.3),
        "init_new_token_ratio": draw.choice((0.0, 0.3, 0.7)), "min_new_token_ratio_factor": 0.14,
        "new_token_ratio_decay_steps": draw.choice((3.0, 600.0)), "retract_decode_steps": draw.choice((0.0, 20.0)),
        "clip_max_new_tokens": draw.choice((1.0, 8.0, 4096.0)),
    }  # fmt: skip
    budget = page * draw.randint(1, 8)
    if options["mixed_chunk"]:
        budget = page * (budget // page + seats)
    requests, now_s = [], 0.0
    for number in range(draw.randint(1, 16)):
        prompt, output = draw.randint(1, longest), draw.randint(1, 3 * page + 12)
        family = draw.randint(0, 3)
        hashes = [family * 1000 + place for place in range(draw.randint(0, prompt // page))] if family else []
        requests.append(
            {
                "id": f"r{number:02}", "arrival_s": now_s, "prompt_tokens": prompt, "output_tokens": output,
                "max_tokens": output + draw.choice((0, 0, 5)), "prefix_hashes": hashes,
            }
        )  # fmt: skip
        now_s += draw.choice((0.0, 0.0, 1.0, 7.0))
    pages = max(-(-(one["prompt_tokens"] + one["max_tokens"]) // page) for one in requests) + 2
    settings = {
        "block_size": page, "max_num_seqs": seats, "max_num_batched_tokens": budget, "max_model_len": 10_000,
        "num_gpu_blocks": pages + draw.choice((0, 2, pages, 4 * pages)), "enable_chunked_prefill": chunking,
        "enable_prefix_caching": draw.random() < 0.7, "async_scheduling": draw.random() < 0.5,
        "batcher_options": options,
    }  # fmt: skip
    return settings, requests


def main() -> None:
    """Compare as many random loads as the first argument says; SGLang's source is in the folder of the second."""
    num, source = int(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, source)
    plain, real = oracle.Scheduler, scheduler_with(load_policy(source))
    draw, counts = random.Random(11), {"loads": 0, "steps": 0, "retractions": 0, "failures": 0}
    for number in range(num):
        settings, requests = draw_load(draw)
        made: list[list[Any]] = []
        for kind in (plain, real):
            oracle.Scheduler = kind  # type: ignore[misc]
            steps: list[Any] = []
            try:
                steps.extend(islice(oracle.replay_steps(settings, requests), MAX_STEPS))
            except oracle.OutOfPagesError:
                steps.append("out of pages")
            made.append(steps)
        for ours, theirs in zip_longest(*made):
            if ours != theirs:
                sys.stdout.write(json.dumps({"load": number, "settings": settings, "oracle": ours, "sglang": theirs}))
                sys.exit(1)
        counts["loads"] += 1
        counts["steps"] += len(made[0])
        with suppress(TypeError):
            counts["retractions"] += sum(len(step["preempted"]) for step in made[0] if step != "out of pages")
        counts["failures"] += "out of pages" in made[0]
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
