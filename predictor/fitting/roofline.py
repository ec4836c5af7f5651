"""Estimates a step time without measurements: bytes over bandwidth and operations over peaks, with fitted shares."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from predictor.fitting.gpus import Gpu
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.regression import rounded
from predictor.step_time import Curve, StepTime, require_seconds

MAX_TOKENS = 16384
MAX_SEQUENCES = 1024
SEQUENCES = (0, 1, 256, MAX_SEQUENCES)
ALL_REDUCES_A_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConstants:
    """The shares of a GPU's peaks that engines reach, and the times that no data sheet has."""

    bandwidth_share: float  # of reading weights
    kv_bandwidth_share: float
    flops16_share: float
    flops8_share: float
    flops4_share: float
    attention_flops_share: float
    link_share: float
    hidden_passes: float  # how often a layer's small kernels read or write a hidden state
    layer_s: float  # launches and small kernels of a layer
    all_reduce_s: float
    step_s: float  # processor time of a step
    prefill_s: float  # more of it where a step has prefill chunks
    sequence_s: float  # processor time per sequence
    overlap: float  # reading and computing take (bytes^n + operations^n)^(1/n): 1 is their sum

    def __post_init__(self) -> None:
        """Refuse values that are no shares or no times."""
        for spec in fields(self):
            require_seconds(spec.name, getattr(self, spec.name))

    def flops_share(self, bits: int) -> float:
        """Return the share of the peak that a unit of so many bits reaches."""
        return {4: self.flops4_share, 8: self.flops8_share, 16: self.flops16_share}[bits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many ranks divide a model: each layer (tensor), and requests with whole attention each (data)."""

    tensor: int = 1
    data: int = 1  # experts are divided among all tensor x data ranks

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One model on GPUs of one kind; a step is that of one data-parallel rank, whose batch the others' equal."""

    model: ModelShape
    gpu: Gpu
    constants: RooflineConstants
    parallel: Parallelism = Parallelism()

    def step_time(self) -> StepTime:
        """Estimate a step time."""
        model, found = self.model, self.constants
        kv_bandwidth = self.gpu.bandwidth * found.kv_bandwidth_share
        flops = self.gpu.flops * found.attention_flops_share
        at_once, each = model.attended_layers()
        heads = model.pair_flops / self.parallel.tensor / flops
        token_s = self._overlapped(
            model.layer_kv_bytes(tensor_parallel=self.parallel.tensor) / kv_bandwidth,
            model.decode_pair_flops / self.parallel.tensor / flops,
        )
        state_s = 2 * model.state_bytes / self.parallel.tensor / kv_bandwidth
        base = Curve(x=(0.0, MAX_SEQUENCES), y=(0.0, rounded(MAX_SEQUENCES * (at_once * token_s + state_s))))
        slope = Curve(x=(1.0,), y=(rounded(each * token_s),))
        tokens = [
            0,
            1,
            *sorted({round(2 ** (step / 4)) for step in range(1, 4 * int(math.log2(MAX_TOKENS)) + 1)} - {1}),
        ]
        return StepTime(
            constant_s=rounded(found.step_s + found.layer_s * model.num_layers + self._all_reduce_s()),
            token_s=rounded(self._all_reduce_token_s()),
            prefill_s=rounded(found.prefill_s),
            prefill_token_s=rounded(at_once * heads),
            prefill_qq_s=rounded(each * heads / 2),
            prefill_qkv_s=rounded(each * heads),
            by_tokens=Curve(
                x=tuple(float(count) for count in tokens),
                y=tuple(rounded(self._layers_s(max(1, count))) for count in tokens),
            ),
            by_sequences=Curve(
                x=tuple(float(count) for count in SEQUENCES),
                y=tuple(rounded(self._head_s(count)) for count in SEQUENCES),
            ),
            decode_base=base,
            decode_slope=slope,
            mixed_base=base,
            mixed_slope=slope,
        )

    def _layers_s(self, num_tokens: int) -> float:
        """Estimate the seconds of all layers without attention over contexts: projections, MLPs and experts."""
        model, each, devices = self.model, self.model.weight_bytes_each, self.parallel.tensor
        copied = model.copied_attention_weights
        projected = copied + (model.attention_weights - copied) / devices
        seconds = model.num_attention_layers * self._product_s(projected, projected, each.attention, num_tokens)
        if model.linear:
            weights = model.linear.weights / devices
            seconds += model.linear.num_layers * self._product_s(weights, weights, each.attention, num_tokens)
        weights = model.mlp_weights / devices
        seconds += model.num_dense_layers * self._product_s(weights, weights, each.mlp, num_tokens)
        if model.experts:
            # Tokens of all data-parallel ranks come to this rank's experts.
            together = num_tokens * self.parallel.data
            read = model.experts.touched(together) * model.expert_weights / self.parallel.ranks
            used = model.experts.per_token * model.expert_weights / devices
            shared = model.shared_weights / devices
            seconds += model.experts.num_layers * (
                self._product_s(read, used, each.experts, num_tokens)
                + self._product_s(shared, shared, each.mlp, num_tokens)
                + model.router_weights * model.number_bytes / (self.gpu.bandwidth * self.constants.bandwidth_share)
            )
        passed = self.constants.hidden_passes * model.hidden_size * model.number_bytes * num_tokens
        return seconds + model.num_layers * passed / (self.gpu.bandwidth * self.constants.bandwidth_share)

    def _product_s(self, read: float, used: float, weight_bytes: float, num_tokens: int) -> float:
        """Estimate products of tokens with `used` weights each, of which `read` are read once."""
        bits = self.gpu.unit_bits(self.model.weight_bytes_each.compute_bits)
        peak = self.gpu.peak(bits) * self.constants.flops_share(bits)
        return self._overlapped(
            read * weight_bytes / (self.gpu.bandwidth * self.constants.bandwidth_share), 2 * used * num_tokens / peak
        )

    def _head_s(self, num_sequences: int) -> float:
        weights = self.model.head_weights / self.parallel.tensor
        bandwidth = self.gpu.bandwidth * self.constants.bandwidth_share
        flops = self.gpu.flops * self.constants.flops16_share
        product_s = self._overlapped(
            weights * self.model.weight_bytes_each.head / bandwidth, 2 * weights * num_sequences / flops
        )
        return (product_s if num_sequences else 0.0) + self.constants.sequence_s * num_sequences

    def _overlapped(self, read_s: float, compute_s: float) -> float:
        """Reading and computing overlap only in part where both take as long: a smooth maximum."""
        power, longer = self.constants.overlap, max(read_s, compute_s)
        if longer == 0:
            return 0.0
        return longer * (1 + (min(read_s, compute_s) / longer) ** power) ** (1 / power)

    def _all_reduce_s(self) -> float:
        """Estimate the latency of communication in a step, which grows with the number of ranks."""
        layers = self.model.num_layers * ALL_REDUCES_A_LAYER
        return layers * self.constants.all_reduce_s * math.log2(self.parallel.ranks)

    def _all_reduce_token_s(self) -> float:
        """Estimate communication per token.

        Two ring all-reduces of its hidden state per layer; with data-parallel ranks it also goes to its experts and
        back.
        """
        hidden, devices = self.model.hidden_size * self.model.number_bytes, self.parallel.tensor
        passed = ALL_REDUCES_A_LAYER * self.model.num_layers * 2 * (devices - 1) / devices * hidden
        if self.parallel.data > 1 and self.model.experts:
            # Hidden states of all ranks are gathered, and the experts' results scattered.
            gathered = 2 * (self.parallel.data - 1) * hidden / devices
            passed += self.model.experts.num_layers * gathered
        return passed / (self.gpu.link_bandwidth * self.constants.link_share)
