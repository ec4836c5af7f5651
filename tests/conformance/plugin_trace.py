"""Runs the plug-in's scheduler classes in vLLM over workloads, as `vllm_trace.py` runs vLLM's own.

Runs under the interpreter that has vLLM; the first argument is the folder that the plug-in is installed in. A workload
has `rule`, its `settings`, and in `seconds` the coefficients of its profile's step time. Of a workload that the class
refuses, the answer is `{"refused": MESSAGE}`. With `fails_at`, the rule raises an exception in that step; with
`state_file`, the scheduler's state is exported too, and `remembered` has what the file says of the rule's memory. With
`script`, its operations are run instead of `requests`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]

import numpy as np  # noqa: E402
import vllm_trace  # noqa: E402
from block_vllm_export import layout, schedulers  # noqa: E402
from block_vllm_export.settings import settings_of  # noqa: E402
from block_vllm_export.wrapping import exporting  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_trace import SamplingParams, Scheduler, SchedulerOutput, Trace, VllmConfig  # noqa: E402


class PluginTrace(Trace):
    """One engine with a rule, one workload; steps take as long as the profile says."""

    def __init__(self, base: VllmConfig, workload: dict[str, Any]) -> None:
        self.remembered: list[dict[str, Any]] = []
        super().__init__(base, workload)

    def build(self, base: VllmConfig) -> Scheduler:
        """Construct the rule's class, on the clock of the trace."""
        self.leads_s: list[float] = []
        chosen = getattr(schedulers, self.workload["rule"])
        chosen = type(chosen.__name__, (chosen,), {"block_clock": staticmethod(lambda: self.now_s)})
        if "state_file" in self.workload:
            os.environ["BLOCK_STATE_FILE"] = self.workload["state_file"]
            chosen = exporting(chosen)
        config = vllm_trace.copy.copy(base)
        config.additional_config = {"block_rule": self.workload["settings"]}
        scheduler = vllm_trace.build_scheduler(config, self.engine, chosen)
        self.planner = scheduler.block_planner
        return scheduler

    def params_of(self, spec: dict[str, Any]) -> SamplingParams:
        """Add the request's facts, as the gateway does."""
        return SamplingParams(max_tokens=spec["max_tokens"], extra_args=spec["xargs"])

    def seconds_of(self, output: SchedulerOutput) -> float:
        """Compute the time of a step; all terms are exact in binary."""
        costs = self.workload["seconds"]
        chunks = output.num_scheduled_tokens
        if not chunks:
            return costs["empty_s"]
        requests = self.scheduler.requests
        seconds = costs["constant_s"]
        for name, tokens in chunks.items():
            before = requests[name].num_computed_tokens - tokens
            seconds += costs["token_s"] * tokens
            seconds += costs["context_s"] * (before + 1) if tokens == 1 else costs["square_s"] * tokens * tokens
        return seconds

    def schedule(self, start_s: float) -> Any:
        """Let the rule fail where the workload says so; note how late the planner believes the step to start."""
        if len(self.steps) == self.workload.get("fails_at"):
            self.planner.rule = None
        launched = super().schedule(start_s)
        step = self.planner.last_step
        self.leads_s.append(float(step["start_s"]) - self.now_s)
        if "state_file" in self.workload:
            self.remembered.append(self.exported_memory())
        return launched

    def exported_memory(self) -> dict[str, Any]:
        """Read what the rule remembers from the state file."""
        data = Path(self.workload["state_file"]).read_bytes()
        table = {
            name: layout.Section(*layout.SECTION.unpack_from(data, layout.TABLE_AT + number * layout.SECTION.size))
            for number, name in enumerate(layout.SECTIONS)
        }
        state = np.frombuffer(data, layout.STATE, 1, table["state"].offset)[0]
        clients = np.frombuffer(data, layout.CLIENT, state["num_clients"], table["clients"].offset)
        return {"memory": state["memory"].tolist(), "clients": clients.tolist(), "room": table["clients"].rows}

    def run(self) -> dict[str, Any]:
        """Report also what the plug-in knows."""
        traced = super().run()
        traced["coverage"]["unplanned"] = self.scheduler.block_num_unplanned
        return traced | {
            "remembered": self.remembered,
            "bad_facts": self.planner.followed.num_bad_facts,
            "has_failed": self.scheduler.block_planner is None,
            "exports": hasattr(self.scheduler, "block_export") and self.scheduler.block_export.exporter is not None,
            "exported": settings_of(self.scheduler)["engine"],
            "leads_s": self.leads_s,
            "factor": self.planner.correction.factor,
            "refused_samples": self.planner.correction.num_refused,
        }


class ScriptedTrace(PluginTrace):
    """One engine with a rule that a script operates, one step in flight; what it says of each step is the answer."""

    def run(self) -> dict[str, Any]:
        """Run the operations, each with its arguments."""
        for operation, *arguments in self.workload["script"]:
            getattr(self, f"do_{operation}")(*arguments)
        return {
            "steps": self.steps,
            "leads_s": self.leads_s,
            "factor": self.planner.correction.factor,
            "unplanned": self.scheduler.block_num_unplanned,
        }

    def do_add(self, name: str, prompt_tokens: int, max_tokens: int, hashes: list[int] | None = None) -> None:
        """Add a request."""
        self.add(name, prompt_tokens, max_tokens, hashes, resumable=False)

    def do_stream(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        """Add a streaming session, or the next part of its input."""
        self.add(name, prompt_tokens, max_tokens, None, resumable=True)

    def add(self, name: str, prompt_tokens: int, max_tokens: int, hashes: list[int] | None, *, resumable: bool) -> None:
        """Add a request that arrives now."""
        spec = {
            "id": name, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "output_tokens": max_tokens,
            "prefix_hashes": hashes, "priority": 0, "arrival_s": self.now_s, "xargs": {}, "resumable": resumable,
        }  # fmt: skip
        self.specs[name] = spec
        self.scheduler.add_request(self.request_of(spec))

    def do_abort(self, name: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def do_pause(self, state: str) -> None:
        """Pause, or continue."""
        self.scheduler.set_pause_state(PauseState[state])

    def do_steps(self, count: int) -> None:
        """Run steps, and note which requests the planner has a slot for."""
        for _ in range(count):
            launched = self.schedule(self.now_s)
            self.now_s = launched.end_s
            self.update(launched)
            planner, followed = self.planner, self.planner.followed
            assert self.scheduler.block_planner is planner
            waits = [one.block_slot for one in self.scheduler.waiting if followed.knows(one)]
            known = followed.rows["num_hashes"][[slot for slot in waits if slot not in followed.looked_up]]
            self.steps[-1] |= {
                "planned": sorted(followed.slots),
                "slots": followed.num_known,
                "old_hits": int((known >= 0).sum()),
                "unfinished": sorted(self.scheduler.requests),
            }


def answer(base: VllmConfig, workload: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of a workload, or the message with which the class refuses it."""
    try:
        trace = (ScriptedTrace if "script" in workload else PluginTrace)(base, workload)
    except ValueError as error:
        return {"refused": str(error)}
    return trace.run()


def main() -> None:
    """Trace every workload on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    vllm_trace.init_none_hash(vllm_trace.sha256)
    base = vllm_trace.base_config()
    for line in sys.stdin:
        answers.write(json.dumps(answer(base, json.loads(line)), separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
