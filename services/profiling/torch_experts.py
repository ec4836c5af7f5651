"""A layer's experts by torch: tokens are routed at random, and each expert multiplies the tokens that it was given.

Engines have one fused kernel for all experts. On CPUs torch's closest one is several times as slow as vLLM's, which is
used where vLLM is installed (`vllm_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from predictor.fitting.model_shard import Share
from services.profiling.torch_device import Run

NUM_ROUTINGS = 4  # random ones, used in turn: they touch different experts


class ExpertKernel(Protocol):
    """All routed experts of a layer on one device."""

    name: str

    def of(self, routings: Sequence[Routing], states: torch.Tensor) -> Run:
        """Return the kernel for tokens with these hidden states."""
        ...


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, and the shares with which their results are added up."""

    experts: torch.Tensor
    shares: torch.Tensor


class TorchExperts:
    """Grouped products: tokens sorted by expert, gated MLPs, and results added up by token."""

    name = "grouped_mm"

    def __init__(self, share: Share, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Take the weights of all experts."""
        self._num = gate_up.shape[0]
        self._per_token = share.model.experts.per_token if share.model.experts else 0
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)

    def of(self, routings: Sequence[Routing], states: torch.Tensor) -> Run:
        """Return the kernel; sorting tokens by expert is done before, as fused kernels need no sorted copy."""
        plans = []
        for routing in routings:
            flat = routing.experts.flatten()
            order = flat.argsort()
            ends = torch.bincount(flat, minlength=self._num).cumsum(0).to(torch.int32)
            shares = routing.shares.flatten()[order, None].to(states.dtype)
            plans.append((order // self._per_token, ends, shares))

        def run(number: int) -> torch.Tensor:
            tokens, ends, shares = plans[number % len(plans)]
            gated = functional.grouped_mm(states[tokens], self._gate_up, offs=ends)
            gate, up = gated.chunk(2, dim=-1)
            given = functional.grouped_mm(functional.silu(gate) * up, self._down, offs=ends)
            return torch.zeros_like(states).index_add_(0, tokens, given * shares)

        return run


def random_routings(share: Share, tokens: int, device: torch.device) -> list[Routing]:
    """Route each token to distinct experts, all equally likely."""
    experts = share.model.experts
    assert experts is not None
    routings = []
    for _ in range(NUM_ROUTINGS):
        drawn = torch.rand(tokens, experts.num, device=device).topk(experts.per_token)
        routings.append(Routing(drawn.indices, torch.softmax(drawn.values, dim=-1)))
    return routings
