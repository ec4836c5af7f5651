"""The network of `roberta`: an encoder of the RoBERTa family, with a median and a spread per served model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from length_tagger.features import NUM_COUNTS
from length_tagger.linear_network import LENGTH_POWER, LOG_LENGTHS, UNIT_LOG
from length_tagger.onnx_form import Array, Ids, Run
from length_tagger.tokenization import padded

LOG_SPREADS = (-4.0, 0.3)
NUM_HIDDEN = 128


class LengthNetwork(nn.Module):
    """Computes log medians and log spreads from token ids and counts: prompts x models."""

    count_means: torch.Tensor
    count_scales: torch.Tensor

    def __init__(self, encoder: nn.Module, size: int, num_models: int, dropout: float = 0.2) -> None:
        """Add a head to an encoder."""
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(2 * size + NUM_COUNTS, NUM_HIDDEN)
        self.out = nn.Linear(NUM_HIDDEN, 2 * num_models)
        self.straight = nn.Linear(NUM_COUNTS, 2 * num_models, bias=False)
        nn.init.zeros_(self.straight.weight)
        self.register_buffer("count_means", torch.zeros(NUM_COUNTS))
        self.register_buffer("count_scales", torch.ones(NUM_COUNTS))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a batch; `mask` is 1 for tokens and 0 for padding."""
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        highest = states.masked_fill(mask.unsqueeze(-1) == 0, -1e4).amax(1)
        scaled = ((counts - self.count_means) / self.count_scales).clamp(-5, 5)
        pooled = self.dropout(torch.cat((mean, highest, scaled.to(mean.dtype)), dim=1))
        hidden = self.dropout(torch.nn.functional.gelu(self.hidden(pooled)))
        out = (self.out(hidden) + self.straight(scaled.to(hidden.dtype))).float()
        medians, spreads = out.chunk(2, dim=1)
        return medians, spreads.clamp(*LOG_SPREADS)


def loss_of(medians: torch.Tensor, log_spreads: torch.Tensor, log_lengths: torch.Tensor) -> torch.Tensor:
    """Return the loss over prompts x models x responses, NaN if missing.

    Medians minimise an absolute error that is weighted by length, as in `linear`; spreads maximise the likelihood of a
    Laplace distribution of the logarithm, which does not affect the medians.
    """
    known = torch.isfinite(log_lengths)
    errors = torch.where(known, (log_lengths.nan_to_num() - medians.unsqueeze(-1)).abs(), 0.0)
    spread = log_spreads.unsqueeze(-1)
    likelihood = torch.where(known, errors.detach() * torch.exp(-spread) + spread, 0.0)
    counting = torch.exp(LENGTH_POWER * (medians.detach().clamp(*LOG_LENGTHS) - UNIT_LOG)).unsqueeze(-1)
    return (counting * errors + likelihood).sum() / known.sum().clamp(min=1)


def batch_of(ids: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange token ids as tensors of a batch."""
    padded_ids, mask = padded(ids, padding)
    return torch.from_numpy(padded_ids), torch.from_numpy(mask)


def network_from(config: Any, num_models: int, weights: Path) -> LengthNetwork:
    """Create a network by a config.json, with weights of a safetensors file."""
    network = LengthNetwork(encoder_from(config), int(config["hidden_size"]), num_models)
    try:
        loaded = {name: tensor.float() for name, tensor in load_file(weights).items()}
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if not all(bool(torch.isfinite(tensor).all()) for tensor in loaded.values()):
        raise ValueError("weights are not finite")
    network.load_state_dict(loaded)
    return network.eval()


def run_of(network: LengthNetwork) -> Run:
    """Return a function that computes a batch by torch, on arrays."""

    def run(ids: Ids, mask: Ids, counts: Array) -> tuple[Array, Array]:
        with torch.inference_mode():
            medians, log_spreads = network(*(torch.from_numpy(one) for one in (ids, mask, counts)))
        return medians.numpy(), log_spreads.numpy()

    return run


def encoder_from(config: Any) -> nn.Module:
    """Create an encoder without weights by a config.json; code of a checkpoint is never run."""
    from transformers import AutoConfig, AutoModel

    fields = {name: value for name, value in config.items() if name != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    extra = {"add_pooling_layer": False} if config["model_type"] in ("roberta", "bert", "xlm-roberta") else {}
    make: Any = AutoModel.from_config
    return make(settings, trust_remote_code=False, **extra)  # type: ignore[no-any-return]
