"""Random engine configurations and request streams that exercise every rule of vLLM's v1 scheduler."""

from __future__ import annotations

from random import Random
from typing import Any

from predictor.vllm_versions import rules_for

# Under priority, vLLM breaks ties of (priority, arrival) one way when it admits and another when it preempts, so two
# requests that do not fit together can take turns without end. Such a run is compared as far as this.
MAX_STEPS = 1000
ADAPTIVE = 0.4  # share of engines with an adaptive threshold


def workload(seed: int, vllm_version: str = "") -> dict[str, Any]:
    """Draw one engine and its requests; the same seed always gives the same workload."""
    rng = Random(seed)
    engine = _engine(rng)
    if vllm_version:
        engine["vllm_version"] = vllm_version
        if rules_for(vllm_version).rules.spares_lone_prefill:  # since then
            engine["long_prefill_token_threshold_adaptive"] = Random(f"adaptive {seed}").random() < ADAPTIVE
    requests = _requests(rng, engine)
    size = engine["block_size"]
    largest = max(-(-(request["prompt_tokens"] + _answer(request, engine)) // size) for request in requests)
    # Every request fits alone; often not much more fits, so that preemption is frequent.
    roomy = rng.randint(largest, 6 * largest)
    tight = rng.choice((0, rng.randint(0, 4), rng.randint(0, largest)))
    slack = roomy if rng.random() < (0.3 if engine["enable_chunked_prefill"] else 0.7) else tight
    engine["num_gpu_blocks"] = largest + slack + 1
    return {"seed": seed, "engine": engine, "requests": requests, "max_steps": MAX_STEPS}


def _engine(rng: Random) -> dict[str, Any]:
    block_size = rng.choice((4, 4, 8, 12, 16, 16, 32))
    max_num_seqs = rng.choice((1, rng.randint(2, 4), rng.randint(3, 8), rng.randint(4, 16), 32))
    max_model_len = block_size * rng.choice((rng.randint(3, 12), rng.randint(8, 24))) + rng.randint(0, block_size - 1)
    chunked = rng.random() < 0.7
    low = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    threshold = rng.choice((rng.randint(1, 8), rng.randint(1, max_model_len // 2))) if rng.random() < 0.4 else 0
    return {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": low + rng.choice((0, rng.randint(0, 4), rng.randint(0, 16), rng.randint(0, 256))),
        "block_size": block_size,
        "num_gpu_blocks": 0,
        "max_model_len": max_model_len,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": chunked,
        "async_scheduling": rng.random() < 0.55,
        "long_prefill_token_threshold": threshold,
        "watermark": rng.choice((0.0, 0.1, round(rng.uniform(0, 0.1), 3))),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
    }


def _requests(rng: Random, engine: dict[str, Any]) -> list[dict[str, Any]]:
    count = rng.choice((rng.randint(2, 8), rng.randint(8, 24), rng.randint(16, 40)))
    arrivals = _arrivals(rng, count)
    ids = [f"r{i}" for i in range(count)]
    if rng.random() < 0.5:
        rng.shuffle(ids)
    num_priorities = rng.choice((1, 2, 4))
    longest_answer = rng.choice((4, 24, 60, 150))
    longest_prompt = rng.choice((2 * engine["block_size"], engine["max_model_len"] // 2, engine["max_model_len"] - 1))
    longest_prompt = min(longest_prompt, engine["max_model_len"] - 1)
    early_ends = rng.choice((0.0, 0.3, 0.9))
    overlong = rng.random() < 0.2  # max_tokens may exceed max_model_len, which then ends the response
    tree = _PrefixTree(rng)
    requests = []
    for name, arrival_s in zip(ids, arrivals, strict=True):
        prompt = rng.randint(1, longest_prompt)
        room = engine["max_model_len"] - prompt
        max_tokens = rng.randint(1, longest_answer) if overlong else rng.randint(1, min(longest_answer, room))
        output = rng.randint(1, max_tokens) if rng.random() < early_ends else max_tokens
        requests.append(
            {
                "id": name,
                "arrival_s": arrival_s,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "max_tokens": max_tokens,
                "priority": rng.randrange(num_priorities) - 1,
                "prefix_hashes": tree.path(prompt // engine["block_size"]),
            }
        )
    return requests


def _answer(request: dict[str, Any], engine: dict[str, Any]) -> int:
    """Return the length of a response, which max_model_len may limit."""
    room: int = engine["max_model_len"] - request["prompt_tokens"]
    return min(request["output_tokens"], room)


def _arrivals(rng: Random, count: int) -> list[float]:
    """Draw arrival times in quarters of a second: all at once, in bursts, evenly, or with idle gaps between."""
    shape = rng.choice(("at once", "bursts", "steady", "gaps"))
    now = rng.choice((0, 0, 7))
    times: list[float] = []
    while len(times) < count:
        burst = {"at once": count, "bursts": rng.randint(1, 8), "steady": 1, "gaps": rng.randint(1, 4)}[shape]
        times += [now / 4] * burst
        pauses = {
            "at once": 1,
            "bursts": rng.randint(8, 120),
            "steady": rng.randint(0, 16),
            "gaps": rng.randint(0, 400),
        }
        now += pauses[shape]
    return times[:count]


class _PrefixTree:
    """Prompts that share prefixes: a block's hash encodes its path from the root, so equal hashes mean equal chains."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.branches = rng.choice((1, 2, 3))
        self.leave = rng.choice((0.05, 0.2, 0.6))
        self.nodes: dict[tuple[int, int], int] = {}
        self.whole = rng.random() < 0.5

    def path(self, num_blocks: int) -> list[int]:
        """Follow shared branches to a random depth, and end with blocks of this prompt's own."""
        node, path = 0, []
        for _ in range(num_blocks):
            if self.rng.random() < self.leave:
                break
            step = (node, self.rng.randrange(self.branches))
            node = self.nodes.setdefault(step, len(self.nodes) + 1)
            path.append(node)
        if not self.whole:
            return path  # blocks without a hash belong to this prompt alone
        while len(path) < num_blocks:
            node = self.nodes.setdefault((node, -1 - len(self.nodes)), len(self.nodes) + 1)
            path.append(node)
        return path
