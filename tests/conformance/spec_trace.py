"""Runs vLLM's scheduler with speculative decoding, where a workload says what is proposed and accepted.

Runs under the interpreter that has vLLM, as `vllm_trace.py`. The engine has `speculative_method`,
`num_speculative_tokens` and `num_prefill_lookahead_tokens`; `drafts.py` draws the numbers of tokens.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import drafts  # noqa: E402
import vllm_trace  # noqa: E402
from vllm.config import SpeculativeConfig  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm_trace import EOS, Launched, Request, Scheduler, Trace, VllmConfig  # noqa: E402


def speculation_of(engine: dict[str, Any]) -> SpeculativeConfig:
    """Make vLLM's configuration of a method, without the draft model that its constructor would load."""
    config = object.__new__(SpeculativeConfig)
    config.method = engine["speculative_method"]
    config.num_speculative_tokens = engine["num_speculative_tokens"]
    config.parallel_drafting = config.disable_eagle_block_drop = False
    config.num_speculative_tokens_per_batch_size = None
    num_modules = max(1, engine["num_prefill_lookahead_tokens"])
    config.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=num_modules))
    return config


class SpecTrace(Trace):
    """One engine with speculative decoding, one workload."""

    def build(self, base: VllmConfig) -> Scheduler:
        """Construct the scheduler."""
        config = copy.copy(base)
        config.speculative_config = speculation_of(self.engine)
        self.sampled: Counter[str] = Counter()
        scheduler = vllm_trace.build_scheduler(config, self.engine)
        reserve = scheduler._reserve_prefill_lookahead

        def watched_reserve(request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
            kept = reserve(request, num_computed_tokens, num_new_tokens)
            self.coverage["prefill_lookahead_cuts"] += kept < num_new_tokens
            return kept

        scheduler._reserve_prefill_lookahead = watched_reserve
        return scheduler

    def probe(self) -> None:
        """Count also requests that are preempted before their draft tokens are verified."""
        super().probe()
        preempt = self.scheduler._preempt_request

        def watched_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
            self.coverage["preempted_with_drafts"] += bool(request.spec_token_ids)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = watched_preempt

    def schedule(self, start_s: float) -> Launched:
        """Plan a step, and note how many draft tokens each request has in it."""
        scheduler, engine = self.scheduler, self.engine
        before = {request.request_id: len(request.spec_token_ids) for request in scheduler.running}
        held = set(before)
        launched = super().schedule(start_s)
        scheduled = launched.output.scheduled_spec_decode_tokens
        self.steps[-1]["drafts"] = {name: len(tokens) for name, tokens in scheduled.items() if tokens}
        launched.output.filled_up = {name for name in scheduled if name not in held}
        self.coverage["filled_up"] += len(launched.output.filled_up)
        for name in launched.output.num_scheduled_tokens:
            request = scheduler.requests[name]
            if before.get(name, 0) > len(scheduled.get(name, ())):
                at_end = request.num_computed_tokens + 1 >= engine["max_model_len"]
                self.coverage["model_len_cuts" if at_end else "draft_budget_cuts"] += 1
        for name in launched.sampled:
            self.sampled[name] += 1
        launched.output.numbers = {name: self.sampled[name] for name in launched.sampled}
        return launched

    def update(self, launched: Launched) -> None:
        """Return the accepted tokens and one more for every request that sampled, then propose further drafts."""
        scheduler, output = self.scheduler, launched.output
        names = list(output.num_scheduled_tokens)
        before = {name: scheduler.requests.get(name) for name in names}
        sampled = [self.tokens_of(name, launched, before[name]) for name in names]
        # vLLM cuts the lists of tokens where a response ends
        ends = {
            name: request.num_output_tokens + len(tokens)
            for (name, request), tokens in zip(before.items(), sampled, strict=True)
            if request is not None
        }
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for name, request in before.items():
            if request is not None and request.is_finished():
                self.coverage["finished"] += 1
                self.coverage["ended_within_accepted"] += request.num_output_tokens < ends[name]
        if not self.engine["async_scheduling"] and names:  # EngineCore.post_step
            proposed = [
                list(range(1, 1 + drafts.proposed(self.workload, name, output.numbers[name])))
                if name in output.numbers
                else []
                for name in names
            ]
            scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))

    def tokens_of(self, name: str, launched: Launched, request: Request | None) -> list[int]:
        """Return the tokens that a request samples: the accepted draft tokens, and one more."""
        output = launched.output
        if name not in launched.sampled:
            return []
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        accepted = 0
        if name not in output.filled_up:
            accepted = min(num_drafts, drafts.accepted(self.workload, name, output.numbers[name]))
        if num_drafts:
            kind = "accepted_all" if accepted == num_drafts else "accepted_some" if accepted else "rejected_all"
            self.coverage[kind] += 1
            if request is not None and request.num_stale_output_tokens > 0:
                self.coverage["stale_drafts"] += 1
        tokens = self.tokens.fresh(1 + accepted)
        if request is not None:
            spec = self.specs[name]
            at = spec["output_tokens"] - request.num_output_tokens - 1
            if spec["output_tokens"] < spec["max_tokens"] and 0 <= at < len(tokens):
                tokens[at] = EOS
        return tokens


def main() -> None:
    """Trace every workload on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    vllm_trace.init_none_hash(vllm_trace.sha256)
    base = vllm_trace.base_config()
    for line in sys.stdin:
        answers.write(json.dumps(SpecTrace(base, json.loads(line)).run(), separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
