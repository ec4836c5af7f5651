"""What a scheduler says about speculative decoding: its settings, and how many draft tokens were accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import layout

UNKNOWN_DRAFT = -1  # the token id with which vLLM fills up requests; no sampled token equals it
EAGLE_METHODS = ("eagle", "eagle3")
OWN_WEIGHT_METHODS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")  # without KV cache of a drafter

REFUSED_OPTIONS = ("num_speculative_tokens_per_batch_size", "parallel_drafting", "disable_eagle_block_drop")


def speculation_settings(scheduler: Any) -> dict[str, Any]:
    """Return the settings of speculative decoding under the names of Block's `EngineConfig`; nothing without it."""
    if not scheduler.num_spec_tokens:
        return {}
    return {
        "speculative_method": scheduling_method(scheduler.vllm_config.speculative_config.method),
        "num_speculative_tokens": int(scheduler.num_spec_tokens),
        "num_prefill_lookahead_tokens": _prefill_lookahead(scheduler),
    }


def scheduling_method(method: str) -> str:
    """Return the method that is scheduled like this one; empty for one that is not modelled."""
    if method in EAGLE_METHODS:
        return "eagle"
    if method in OWN_WEIGHT_METHODS:
        return "ngram"
    return method if method in ("draft_model", "mtp") else ""


def unsupported_speculation(scheduler: Any) -> str:
    """Return what of a scheduler's speculative decoding is not modelled; empty where all is."""
    if not scheduler.num_spec_tokens:
        return ""
    config = scheduler.vllm_config.speculative_config
    method = getattr(config, "method", None) or "diffusion"
    refused = {
        f"method {method}": not scheduling_method(method),
        f"more than {layout.MAX_DRAFT_TOKENS} draft tokens": scheduler.num_spec_tokens > layout.MAX_DRAFT_TOKENS,
        "a KV connector": getattr(scheduler, "connector", None) is not None,
        **{name: bool(getattr(config, name, False)) for name in REFUSED_OPTIONS},
    }
    return next((f"speculative decoding with {what}" for what, is_used in refused.items() if is_used), "")


def count_drafts(state: Any, entries: Iterable[tuple[Any, int, int, int]], output: Any, results: Any) -> None:
    """Count a step's drafts and what was accepted of them, in a row of `layout.STATE`.

    Left out are requests that ended with the step, whose output vLLM has cut, and those that were filled up.
    """
    rows = getattr(results, "sampled_token_ids", None) or ()
    index_of = getattr(results, "req_id_to_index", None) or {}
    for entry, sampled, drafts, tokens in entries:
        if not sampled or tokens != 1 + drafts or entry.request.is_finished():
            continue
        name = entry.request.request_id
        if not drafts:
            state["num_draft_chances"] += entry.request.num_output_tokens > 1  # else it was the end of its prompt
            continue
        num_tokens = len(rows[index_of[name]]) if name in index_of and index_of[name] < len(rows) else 0
        drafted = output.scheduled_spec_decode_tokens.get(name) or ()
        if not num_tokens or (_is_filled_up(entry, drafted)):
            continue
        state["num_draft_chances"] += 1
        state["num_drafts"] += 1
        state["num_draft_tokens"] += drafts
        state["num_accepted"][0, : min(drafts, num_tokens - 1)] += 1


def _is_filled_up(entry: Any, drafted: Any) -> bool:
    """Return whether a request had one token left to compute when it was admitted, and was filled up."""
    is_first = entry.request.num_output_tokens <= 1
    return is_first and all(token == UNKNOWN_DRAFT for token in drafted)


def _prefill_lookahead(scheduler: Any) -> int:
    lookahead = int(getattr(scheduler, "num_prefill_lookahead", 0))
    return lookahead if lookahead > 1 else 0
