"""Random engines and requests with several prompts and several responses to each."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import islice
from random import Random
from typing import Any

from predictor.request import RequestFacts
from predictor.request_group import PromptFacts, group_of, members_of
from simulator.replay import replay_steps
from tests.conformance.ours import ONE_SECOND, our_config
from tests.conformance.workloads import workload

MOST_RESPONSES = 8  # of a request


def sampling_workload(seed: int) -> dict[str, Any]:
    """Draw one engine and its requests; the same seed always gives the same workload."""
    load = workload(seed)
    rng = Random(f"sampling {seed}")
    left, requests = list(load["requests"]), []
    share = rng.choice((0.3, 0.7, 1.0))
    while left:
        num_prompts = rng.choice((1, 1, 2, rng.randint(2, 5))) if rng.random() < share else 1
        some, left = left[:num_prompts], left[num_prompts:]
        n = rng.choice((2, 3, rng.randint(2, MOST_RESPONSES))) if rng.random() < share else 1
        room = min(load["engine"]["max_model_len"] - one["prompt_tokens"] for one in some)
        max_tokens = max(1, min(some[0]["max_tokens"], room))
        requests.append(
            {
                **{name: some[0][name] for name in ("id", "arrival_s", "priority")},
                "n": n,
                "max_tokens": max_tokens,
                "output_tokens": min(some[0]["output_tokens"], max_tokens),
                "prompts": [{name: one[name] for name in ("prompt_tokens", "prefix_hashes")} for one in some],
            }
        )
    engine = load["engine"]
    longest = max(prompt["prompt_tokens"] + spec["max_tokens"] for spec in requests for prompt in spec["prompts"])
    num_blocks = max(engine["num_gpu_blocks"], -(-longest // engine["block_size"]) + 1)
    return {**load, "engine": {**engine, "num_gpu_blocks": num_blocks}, "requests": requests}


def our_requests(load: dict[str, Any]) -> list[RequestFacts]:
    """Return the engine's requests, with vLLM's names."""
    requests: list[RequestFacts] = []
    for spec in load["requests"]:
        whole = RequestFacts(
            request_id=spec["id"],
            arrival_s=spec["arrival_s"],
            prompt_tokens=sum(prompt["prompt_tokens"] for prompt in spec["prompts"]),
            output_tokens=spec["output_tokens"],
            max_tokens=spec["max_tokens"],
            priority=spec["priority"],
        )
        prompts = [
            PromptFacts(tokens=one["prompt_tokens"], prefix_hashes=tuple(one["prefix_hashes"]))
            for one in spec["prompts"]
        ]
        group = group_of(whole, num_sequences=spec["n"], prompts=prompts, block_size=load["engine"]["block_size"])
        for index, member in enumerate(members_of(group)):
            prompt, sequence = divmod(index, spec["n"])
            name = f"cmpl-{spec['id']}-{prompt}"
            requests.append(replace(member, request_id=name if spec["n"] == 1 else f"{sequence}_{name}"))
    return requests


def our_steps(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay a workload on the engine model, every step taking one second."""
    steps = replay_steps(our_config(load), ONE_SECOND, our_requests(load))
    return [asdict(step) for step in islice(steps, load["max_steps"])]
