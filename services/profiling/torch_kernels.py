"""One layer's kernels by torch, on one device's shard of the weights, which are random.

GEMMs, norms and embedding are the kernels that engines run, or torch's closest ones. Engines fuse kernels that only
move data; for rotary positions and the activation, one kernel that moves as many bytes replaces these. A router's cost
is that of its product, a softmax and the choice of the largest; biases, sigmoids and groups of experts are left out.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from predictor.fitting.model_shard import Share
from services.profiling.torch_device import Run
from services.profiling.torch_experts import ExpertKernel, TorchExperts, random_routings
from services.profiling.torch_latent import LatentProjections
from services.profiling.torch_weights import RandomWeights, multiplied, product_of
from services.profiling.vllm_kernels import VllmCpuExperts, cpu_operators, has_experts_of

EPSILON = 1e-6


class TorchLayer:
    """A layer's weights, and its kernels for a number of tokens or sequences."""

    def __init__(self, share: Share, device: torch.device) -> None:
        """Draw the weights, each with enough copies to exceed every cache."""
        self._share = share
        self._device = device
        self._weights = weights = RandomWeights(share, device)
        hidden = share.model.hidden_size
        self._projections = (LatentProjections if share.model.latent else HeadProjections)(share, weights)
        if share.model.num_dense_layers:
            self._mlp = Mlp(weights, hidden, share.intermediate_size)
        if share.model.experts:
            num, size = share.model.experts.num, share.expert_size
            self._router = weights.products(num, hidden)
            self._shared = Mlp(weights, hidden, share.shared_size) if share.shared_size else None
            pairs = zip(weights.copies(num * 2 * size, hidden), weights.copies(num * size, hidden), strict=False)
            self._experts = [
                experts_for(share, device, gate_up.view(num, 2 * size, hidden), down.view(num, hidden, size))
                for gate_up, down in pairs
            ]
        self._vocabulary = weights.random(share.vocab_size, hidden)
        self._head = product_of(self._vocabulary, device)
        self._norm = weights.random(hidden)

    def dense(self, tokens: int) -> dict[str, Run]:
        """Return the kernels that depend only on the number of tokens, by name."""
        share, model = self._share, self._share.model
        hidden, residual = (self._weights.random(tokens, model.hidden_size) for _ in range(2))
        ids = torch.randint(share.vocab_size, (tokens,), device=self._device)

        def norm(_: int) -> torch.Tensor:
            residual.add_(hidden)
            return functional.rms_norm(residual, (model.hidden_size,), self._norm, EPSILON)

        kernels: dict[str, Run] = {
            "embedding": lambda _: functional.embedding(ids, self._vocabulary),
            "norm": norm,
            **self._projections.kernels(hidden),
        }
        if model.num_dense_layers:
            kernels |= self._mlp.kernels(hidden)
        if model.experts:
            kernels |= self._expert_kernels(hidden)
        return kernels

    def _expert_kernels(self, hidden: torch.Tensor) -> dict[str, Run]:
        """Return the kernels of a layer with experts."""
        experts = self._share.model.experts
        assert experts is not None
        routings = random_routings(self._share, len(hidden), self._device)
        runs = [kernel.of(routings, hidden) for kernel in self._experts]

        def router(number: int) -> object:
            scores = self._router[number % len(self._router)](hidden, None)
            return torch.softmax(scores, dim=-1).topk(experts.per_token)

        kernels: dict[str, Run] = {"router": router, "experts": lambda number: runs[number % len(runs)](number)}
        if self._shared:
            kernels |= {f"shared_{name}": run for name, run in self._shared.kernels(hidden).items()}
        return kernels

    def head(self, sequences: int) -> Run:
        """Return the kernel that samples a token per sequence: output embedding and argmax."""
        hidden = self._weights.random(sequences, self._share.model.hidden_size)
        return lambda _: self._head(hidden, None).float().argmax(dim=-1)


class HeadProjections:
    """The projections around an attention whose heads have keys and values of their own or share them in groups."""

    def __init__(self, share: Share, weights: RandomWeights) -> None:
        """Draw the weights."""
        self._share = share
        self._weights = weights
        hidden = share.model.hidden_size
        self._qkv = weights.products(share.qkv_size, hidden)
        self._o = weights.products(hidden, share.attended_size)
        self._bias = weights.random(share.qkv_size) if share.has_qkv_bias else None
        self._norm = weights.random(share.model.head_dim)

    def kernels(self, hidden: torch.Tensor) -> dict[str, Run]:
        """Return the kernels for tokens with these hidden states."""
        share, random, tokens, head_dim = self._share, self._weights.random, len(hidden), self._share.model.head_dim
        queries_and_keys = random(tokens, share.num_heads + share.num_kv_heads, head_dim)
        rotated, rotation = torch.empty_like(queries_and_keys), random(tokens, 1, head_dim)
        keys_and_values = random(tokens, 2 * share.num_kv_heads * head_dim)
        cache, slots = torch.empty_like(keys_and_values), torch.randperm(tokens, device=hidden.device)
        kernels: dict[str, Run] = {
            "qkv": multiplied(hidden, self._qkv, self._bias),
            "rotary": lambda _: torch.mul(queries_and_keys, rotation, out=rotated),
            "kv_write": lambda _: cache.index_copy_(0, slots, keys_and_values),
            "o": multiplied(random(tokens, share.attended_size), self._o),
        }
        if share.has_qk_norm:
            kernels["qk_norm"] = lambda _: functional.rms_norm(queries_and_keys, (head_dim,), self._norm, EPSILON)
        return kernels


class Mlp:
    """A gated MLP: its weights, and its kernels."""

    def __init__(self, weights: RandomWeights, hidden: int, size: int) -> None:
        """Draw the weights."""
        self._size = size
        self._random = weights.random
        self._gate_up, self._down = weights.products(2 * size, hidden), weights.products(hidden, size)

    def kernels(self, hidden: torch.Tensor) -> dict[str, Run]:
        """Return the kernels for tokens with these hidden states."""
        gated, activated = self._random(len(hidden), 2 * self._size), self._random(len(hidden), self._size)
        return {
            "gate_up": multiplied(hidden, self._gate_up),
            "activation": lambda _: functional.glu(gated),
            "down": multiplied(activated, self._down),
        }


def experts_for(share: Share, device: torch.device, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertKernel:
    """Return the experts' kernel: vLLM's on CPUs if it is installed, else torch's."""
    operators = cpu_operators() if device.type == "cpu" else None
    if operators is not None and has_experts_of(share):
        return VllmCpuExperts(operators, gate_up, down)
    return TorchExperts(share, gate_up, down)
