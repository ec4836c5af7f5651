"""Runs the plug-in's scheduler classes in vLLM over workloads, as `vllm_trace.py` runs vLLM's own.

Runs under the interpreter that has vLLM; the first argument is the folder that the plug-in is installed in. A workload
has `rule`, its `settings`, and in `seconds` the coefficients of its profile's step time. Of a workload that the class
refuses, the answer is `{"refused": MESSAGE}`. With `fails_at`, the rule raises an exception in that step; with
`state_file`, the scheduler's state is exported too, and `remembered` has what the file says of the rule's memory.
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
from vllm_trace import SamplingParams, Scheduler, SchedulerOutput, Trace, VllmConfig  # noqa: E402


class PluginTrace(Trace):
    """One engine with a rule, one workload; steps take as long as the profile says."""

    def __init__(self, base: VllmConfig, workload: dict[str, Any]) -> None:
        self.remembered: list[dict[str, Any]] = []
        super().__init__(base, workload)

    def build(self, base: VllmConfig) -> Scheduler:
        """Construct the rule's class, on the clock of the trace."""
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
        """Let the rule fail where the workload says so."""
        if len(self.steps) == self.workload.get("fails_at"):
            self.planner._rule = None
        launched = super().schedule(start_s)
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
            "bad_facts": self.planner.num_bad_facts,
            "has_failed": self.scheduler.block_planner is None,
            "exports": hasattr(self.scheduler, "block_export") and self.scheduler.block_export.exporter is not None,
            "exported": settings_of(self.scheduler)["engine"],
        }


def answer(base: VllmConfig, workload: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of a workload, or the message with which the class refuses it."""
    try:
        trace = PluginTrace(base, workload)
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
