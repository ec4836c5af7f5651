"""Runs vLLM's scheduler with a KV connector whose transfers take the times of a workload.

Runs under the interpreter that has vLLM, as `vllm_trace.py`. The engine has `kv_role` and `kv_load_failure_policy`. A
request with `leg` prefill is held for `held_s` after its end; one with `leg` decode is fetched within `transfer_s`, of
which `valid_share` arrives where `fails` is true. `abort_s` is when its client leaves, which counts unless it has
been scheduled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import vllm_trace  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm_trace import SamplingParams, SchedulerOutput, Trace, VllmConfig  # noqa: E402

WAITING = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class StandIn(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector: what NIXL decides, with transfers that the trace ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.started: list[tuple[Request, list[int], int]] = []  # with its blocks, and how many of them are cached
        self.held: list[Request] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Fetch the whole prompt, once."""
        params = request.kv_transfer_params or {}
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if params.get("do_remote_prefill") and missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Start the transfer."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            size = self._vllm_config.cache_config.block_size
            num_cached = (request.num_prompt_tokens - num_external_tokens) // size
            self.started.append((request, blocks.get_block_ids()[0], num_cached))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a prefill that has ended by itself."""
        params = request.kv_transfer_params or {}
        if (
            not params.get("do_remote_decode")
            or not any(block_ids)
            or request.status
            not in (
                RequestStatus.FINISHED_LENGTH_CAPPED,
                RequestStatus.FINISHED_STOPPED,
            )
        ):
            return False, None
        self.held.append(request)
        return True, {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Send nothing to workers."""
        del scheduler_output
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not called: there are no workers."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not called: there are no workers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not called: there are no workers."""

    def wait_for_save(self) -> None:
        """Not called: there are no workers."""


class LegsTrace(Trace):
    """One engine with a connector, one workload."""

    def __init__(self, base: VllmConfig, workload: dict[str, Any]) -> None:
        super().__init__(base, workload)
        self.connector: StandIn = self.scheduler.connector
        self.fetches: list[tuple[float, str, list[int]]] = []  # when it ends, whose, and blocks that do not arrive
        self.held: list[tuple[float, str]] = []
        leaving = [spec for spec in workload["requests"] if spec["abort_s"] is not None]
        self.leaving = sorted(leaving, key=lambda spec: spec["abort_s"])
        self.delivered = False

    def params_of(self, spec: dict[str, Any]) -> SamplingParams:
        """Add what a router adds."""
        params = {"prefill": "do_remote_decode", "decode": "do_remote_prefill"}
        extra = {"kv_transfer_params": {params[spec["leg"]]: True}} if spec["leg"] in params else {}
        return SamplingParams(max_tokens=spec["max_tokens"], extra_args=extra)

    def absorb(self, now_s: float) -> None:
        """Add arrivals, then abort requests whose clients leave."""
        super().absorb(now_s)
        while self.leaving and self.leaving[0]["abort_s"] <= now_s:
            name = self.leaving.pop(0)["id"]
            request = self.scheduler.requests.get(name)
            if request is not None and request.status in WAITING:
                fetching = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                self.coverage["aborted_while_fetching" if fetching else "aborted_while_waiting"] += 1
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self, start_s: float) -> Any:
        """Plan a step; transfers start with it."""
        launched = super().schedule(start_s)
        for request, blocks, num_cached in self.connector.started:
            spec = self.specs[request.request_id]
            missing: list[int] = []
            if spec["fails"]:
                num_valid = num_cached + int(spec["valid_share"] * (len(blocks) - num_cached))
                missing = blocks[num_valid:]
                self.coverage["failed_wholly" if num_valid == 0 else "failed_partly"] += 1
            self.fetches.append((start_s + spec["transfer_s"], request.request_id, missing))
            self.coverage["fetches"] += 1
            self.coverage["fetches_with_hits"] += num_cached > 0
        self.connector.started.clear()
        return launched

    def transfers_ended(self) -> KVConnectorOutput:
        """Report the transfers that have ended by now."""
        # lists, where vLLM has sets: the order in which blocks are freed must be the same in every run
        output = KVConnectorOutput(finished_sending=[], finished_recving=[])
        for ended in sorted((one for one in self.fetches if one[0] <= self.now_s), key=lambda one: one[0]):
            self.fetches.remove(ended)
            output.finished_recving.append(ended[1])
            output.invalid_block_ids.update(ended[2])
        for released in sorted((one for one in self.held if one[0] <= self.now_s), key=lambda one: one[0]):
            self.held.remove(released)
            output.finished_sending.append(released[1])
        self.delivered = self.delivered or not output.is_empty()
        return output

    def update(self, launched: Any) -> None:
        """Process a step; prefills that end with it are held from then on."""
        super().update(launched)
        self.note_held()

    def note_held(self) -> None:
        """Note until when the blocks of prefills that have just ended are held."""
        for request in self.connector.held:
            self.held.append((self.now_s + self.specs[request.request_id]["held_s"], request.request_id))
            self.coverage["held"] += 1
        self.connector.held.clear()

    def deliver(self) -> None:
        """Report transfers while no step is in flight, as an idle engine does in empty steps."""
        empty = SchedulerOutput.make_empty()
        self.scheduler.update_from_output(
            empty,
            vllm_trace.ModelRunnerOutput(
                req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=self.transfers_ended()
            ),
        )

    def run(self) -> dict[str, Any]:
        """Run to the end as `Trace.run`; an empty step that only a transfer or an arrival can change is not recorded."""
        depth = 2 if self.engine["async_scheduling"] else 1
        in_flight: list[Any] = []
        self.now_s = last_end_s = 0.0
        stuck = False
        while len(self.steps) < self.max_steps:
            num_before = len(self.arrivals) + len(self.leaving)
            self.absorb(self.now_s)
            stuck = stuck and not self.delivered and len(self.arrivals) + len(self.leaving) == num_before
            self.delivered = False
            if not stuck and len(in_flight) < depth and self.scheduler.get_num_unfinished_requests():
                launched = self.schedule(max(self.now_s, last_end_s))
                is_empty = not launched.output.num_scheduled_tokens and not self.preempted
                if is_empty and not (in_flight and in_flight[0].output.num_scheduled_tokens):
                    self.steps.pop()
                    stuck = True
                    self.coverage["waited_for_transfers"] += 1
                    continue
                last_end_s = launched.end_s
                in_flight.append(launched)
                continue
            if in_flight:
                oldest = in_flight.pop(0)
                self.now_s = max(self.now_s, oldest.end_s)
                self.update(oldest)
                continue
            next_s = [one[0] for one in (*self.fetches, *self.held)]
            next_s += [self.arrivals[0]["arrival_s"]] if self.arrivals else []
            next_s += [self.leaving[0]["abort_s"]] if self.leaving else []
            if not next_s or not (self.arrivals or self.scheduler.get_num_unfinished_requests()):
                break
            self.now_s = max(self.now_s, min(next_s))
            self.deliver()
        self.coverage["cut_off"] += self.scheduler.get_num_unfinished_requests() > 0
        return {"steps": self.steps, "coverage": {name: count for name, count in self.coverage.items() if count}}


def main() -> None:
    """Trace every workload on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    KVConnectorFactory.register_connector(vllm_trace.STAND_IN, "__main__", "StandIn")
    vllm_trace.init_none_hash(vllm_trace.sha256)
    base = vllm_trace.base_config()
    for line in sys.stdin:
        answers.write(json.dumps(LegsTrace(base, json.loads(line)).run(), separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
