"""The network of `roberta`: an encoder of the RoBERTa family, and on it a median and a spread for each served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import nn

from length_tagger.features import NUM_COUNTS, features

LOG_SPREADS = (-4.0, 0.3)
CHARACTERS_PER_TOKEN = 24  # no tokenizer needs to see more to fill the places there are
NUM_HIDDEN = 128


class LengthNetwork(nn.Module):
    """Reads token ids and counts, and gives log medians and log spreads: prompts x models."""

    count_means: torch.Tensor
    count_scales: torch.Tensor

    def __init__(self, encoder: nn.Module, size: int, num_models: int, dropout: float = 0.2) -> None:
        """Put a head on an encoder."""
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
        """Read a batch; `mask` is 1 where there is a token."""
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


def loss_of(medians: torch.Tensor, log_spreads: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Give the loss over prompts x models x answers, NaN where there is no answer.

    Medians learn from the absolute error of the logarithm; spreads from the likelihood of a Laplace distribution
    around them, which does not pull at the medians.
    """
    known = torch.isfinite(wanted)
    errors = torch.where(known, (wanted.nan_to_num() - medians.unsqueeze(-1)).abs(), 0.0)
    spread = log_spreads.unsqueeze(-1)
    likelihood = torch.where(known, errors.detach() * torch.exp(-spread) + spread, 0.0)
    return (errors + likelihood).sum() / known.sum().clamp(min=1)


def encoded(tokenizer: Tokenizer, prompts: Sequence[str], most_tokens: int) -> list[list[int]]:
    """Turn prompts into token ids; of a longer prompt head and tail are kept, the middle is not read."""
    most_characters = most_tokens * CHARACTERS_PER_TOKEN
    cut = [
        prompt if len(prompt) <= 2 * most_characters else prompt[:most_characters] + prompt[-most_characters:]
        for prompt in prompts
    ]
    plain = [text.encode("utf-8", "replace").decode("utf-8") for text in cut]
    ids = [one.ids for one in tokenizer.encode_batch_fast(plain)]
    head = most_tokens * 2 // 3
    return [one if len(one) <= most_tokens else one[:head] + one[head - most_tokens :] for one in ids]


def batch_of(ids: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay token ids out as a batch; a prompt without tokens is one padding that is read."""
    longest = max(1, max(map(len, ids), default=1))
    laid = np.full((len(ids), longest), padding, np.int64)
    mask = np.zeros((len(ids), longest), np.int64)
    for row, one in enumerate(ids):
        laid[row, : len(one)] = one
        mask[row, : max(1, len(one))] = 1
    return torch.from_numpy(laid), torch.from_numpy(mask)


def counts_of(prompts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Count what tokens that were cut away cannot say."""
    return features(prompts).counts


def encoder_from(config: Any) -> nn.Module:
    """Make an encoder without weights as a config.json says; code in a checkpoint is never run."""
    from transformers import AutoConfig, AutoModel

    fields = {name: value for name, value in config.items() if name != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    extra = {"add_pooling_layer": False} if config["model_type"] in ("roberta", "bert", "xlm-roberta") else {}
    make: Any = AutoModel.from_config
    return make(settings, trust_remote_code=False, **extra)  # type: ignore[no-any-return]
