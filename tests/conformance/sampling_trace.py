"""Runs vLLM's scheduler over requests with several prompts and several responses to each.

Runs under the interpreter that has vLLM, as `vllm_trace.py`. A request has `prompts` and `n`; vLLM's own ParentRequest
names the requests that the engine makes of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import vllm_trace  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.parallel_sampling import ParentRequest  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm_trace import EOS, SamplingParams, Trace, VllmConfig, init_none_hash, sha256  # noqa: E402


class SamplingTrace(Trace):
    """Expands each request as vLLM's front end does."""

    def __init__(self, base: VllmConfig, workload: dict[str, Any]) -> None:
        super().__init__(base, workload)
        self.specs = {}

    def absorb(self, now_s: float) -> None:
        """Add all requests of each client's request that has arrived."""
        while self.arrivals and self.arrivals[0]["arrival_s"] <= now_s:
            for request in self.requests_of(self.arrivals.popleft()):
                self.scheduler.add_request(request)

    def requests_of(self, spec: dict[str, Any]) -> list[Request]:
        """Make vLLM's requests."""
        made = []
        for number, prompt in enumerate(spec["prompts"]):
            ids = self.tokens.prompt(prompt, self.engine["block_size"])
            params = SamplingParams(n=spec["n"], max_tokens=spec["max_tokens"], temperature=1.0)
            params.update_from_generation_config({}, EOS)
            name = f"cmpl-{spec['id']}-{number}"
            children = [(name, params)]
            if params.n > 1:
                parent = ParentRequest(engine_core_request(name, ids, params, spec))
                children = [parent.get_child_info(index) for index in range(params.n)]
            for child, child_params in children:
                assert child_params.n == 1
                self.specs[child] = spec
                made.append(
                    Request(
                        request_id=child,
                        prompt_token_ids=ids,
                        sampling_params=child_params,
                        pooling_params=None,
                        arrival_time=spec["arrival_s"],
                        priority=spec["priority"],
                        block_hasher=self.hasher,
                    )
                )
        return made


def engine_core_request(name: str, ids: list[int], params: SamplingParams, spec: dict[str, Any]) -> EngineCoreRequest:
    """Make the request that a ParentRequest is made from."""
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=spec["arrival_s"],
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=spec["priority"],
    )


def main() -> None:
    """Trace every workload on standard input; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    init_none_hash(sha256)
    base = vllm_trace.base_config()
    for line in sys.stdin:
        answers.write(json.dumps(SamplingTrace(base, json.loads(line)).run(), separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
