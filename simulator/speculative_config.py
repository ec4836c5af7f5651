"""Reads vLLM's `--speculative-config` as settings of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from predictor.speculation import METHODS
from predictor.suggestions import unknown_choice

# vLLM's names of methods that are scheduled like one of ours
SAME_AS = {"eagle3": "eagle", "ngram_gpu": "ngram"}
# of `--speculative-config`: ours by vLLM's names, and those that only concern a real model
FIELDS = {"method": "speculative_method", "num_speculative_tokens": "num_speculative_tokens"}
OF_THE_MODEL = ("model", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size", "quantization")


def speculative_settings(text: str) -> Mapping[str, Any]:
    """Read vLLM's `--speculative-config` as settings of an engine; ValueError for what cannot be emulated."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"speculative_config: is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("speculative_config: must be a JSON object")
    for name in given:
        if name not in FIELDS and name not in OF_THE_MODEL:
            known = ", ".join((*FIELDS, *OF_THE_MODEL))
            raise ValueError(f"speculative_config.{name}: is not emulated; the known ones are {known}")
    for name in FIELDS:
        if name not in given:
            raise ValueError(f"speculative_config.{name}: is missing")
    method = SAME_AS.get(given["method"], given["method"])
    if method not in METHODS:
        raise unknown_choice("speculative_config.method", given["method"], (*METHODS, *SAME_AS))
    return {"speculative_method": method, "num_speculative_tokens": given["num_speculative_tokens"]}
