"""Random weights of one device's shard, and the products with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import CACHE_BYTES
from services.profiling.torch_device import Run
from services.profiling.vllm_kernels import Product, cpu_operators, vllm_cpu_product

SCALE = 0.02  # of weights, so that products neither overflow nor vanish
MAX_DRAWN = 2**20


class RandomWeights:
    """Draws the weights of a shard's layers."""

    def __init__(self, share: Share, device: torch.device) -> None:
        """Draw nothing yet."""
        self.device = device
        self._dtype = getattr(torch, share.dtype)
        self._num_layers = share.model.num_layers

    def products(self, rows: int, columns: int) -> list[Product]:
        """Draw a matrix, with enough copies to exceed every cache, and return the products with each."""
        return [product_of(weight, self.device) for weight in self.copies(rows, columns)]

    def copies(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Draw a matrix, with enough copies to exceed every cache."""
        first = self.random(rows, columns)
        size = first.element_size() * first.nelement()
        more = min(self._num_layers, -(-CACHE_BYTES // size)) - 1
        return [first, *(first.clone() for _ in range(more))]

    def random(self, *sizes: int) -> torch.Tensor:
        """Draw a tensor."""
        return drawn(sizes, self._dtype, self.device).mul_(SCALE)


def product_of(weight: torch.Tensor, device: torch.device) -> Product:
    """Return the product of hidden states and a matrix: vLLM's on CPUs if it is installed, else torch's."""
    operators = cpu_operators() if device.type == "cpu" else None
    if operators is not None:
        return vllm_cpu_product(operators, weight)
    return lambda states, bias: functional.linear(states, weight, bias)


def multiplied(states: torch.Tensor, products: list[Product], bias: torch.Tensor | None = None) -> Run:
    """Return a kernel that uses the products in turn."""
    return lambda number: products[number % len(products)](states, bias)


def drawn_for(share: Share, device: torch.device, *sizes: int) -> torch.Tensor:
    """Fill a tensor of the shard's data type with normal numbers."""
    return drawn(sizes, getattr(torch, share.dtype), device)


def drawn(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Fill a tensor with normal numbers; at most MAX_DRAWN are drawn and then repeated, which is faster on CPUs."""
    count = math.prod(sizes)
    some = torch.empty(min(count, MAX_DRAWN), dtype=dtype, device=device).normal_()
    return some.repeat(-(-count // len(some)))[:count].view(*sizes)
