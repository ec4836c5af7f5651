"""What requests with deadlines need at least of the instances that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from predictor.step_time import StepTime, least_prefill_per_pair
from scheduler.instances import BOTH
from simulator.fleet import InstanceSpec
from simulator.step_shapes import StepShapes, step_shapes
from simulator.workload import RequestLengths, Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeeds:
    """The needs of requests with deadlines, in columns.

    A request may wait `patience_s` in all for the steps that decode it: TTFT + (d - 1) · TPOT for a response of d
    tokens, less the least time until its first token. It is infinite without a TPOT target.
    """

    decodes: Floats
    prompt_tokens: Floats  # that have to be computed
    context_tokens: Floats  # that decodes read, summed up over them
    attention_s: Floats  # of the prefill
    patience_s: Floats
    tpot_slo_s: Floats  # NaN: no target
    is_possible: npt.NDArray[np.bool_]  # an idle instance could keep the deadlines

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.decodes)

    def chosen(self, rows: npt.NDArray[np.bool_]) -> RequestNeeds:
        """Select requests."""
        return RequestNeeds(**{name: getattr(self, name)[rows] for name in RequestNeeds.__slots__})

    @property
    def per_decode_s(self) -> Floats:
        """The patience for each decode; infinite where there is none to wait for."""
        return np.where(self.decodes > 0, self.patience_s / np.maximum(1.0, self.decodes), np.inf)


def allowed_e2e_s(work: Workload) -> float | None:
    """Return the P99 of the times after which responses with both targets must have ended; None without any."""
    levels = work.service
    if levels is None:
        return None
    allowed_s = levels.ttft_slo_s + (work.lengths.output_tokens - 1) * levels.tpot_slo_s
    known = allowed_s[~np.isnan(allowed_s)]
    return float(np.percentile(known, 99)) if len(known) else None


def kinds_of(specs: Sequence[InstanceSpec]) -> set[InstanceSpec]:
    """Return the different instances; roles and connectors do not count."""
    return {replace(spec, role=BOTH, config=replace(spec.config, kv_role="")) for spec in specs}


def the_only_kind(specs: Sequence[InstanceSpec]) -> InstanceSpec:
    """Return the instance that all are."""
    kinds = kinds_of(specs)
    if len(kinds) > 1:
        raise ValueError("bound: is defined for equal instances only")
    return kinds.pop()


def needs_of(spec: InstanceSpec, work: Workload) -> tuple[RequestNeeds, StepShapes]:
    """Return the needs of the requests with a TTFT target, and the steps of an engine that serves them.

    With prefix caching, a content is computed once.
    """
    levels, lengths = work.service, work.lengths
    if levels is None or np.isnan(levels.ttft_slo_s).all():
        raise ValueError("mix: no request has a ttft_slo_s, so none has deadlines")
    due = ~np.isnan(levels.ttft_slo_s)
    reused = (_reused_tokens(lengths) if spec.config.enable_prefix_caching else np.zeros(len(work)))[due]
    prompts = lengths.prompt_tokens[due].astype(np.float64)
    room = spec.config.max_model_len - prompts  # longer responses are cut
    outputs = np.minimum(lengths.output_tokens[due], room)
    shapes = step_shapes(spec, max_context=float((prompts + outputs).max()), shares_blocks=bool(reused.any()))
    decodes = np.maximum(0.0, outputs - 1.0)  # the prompt's step has the first token
    computed = prompts - reused
    chunk = spec.config.max_num_batched_tokens
    attention_s = spec.pace * _prefill_attention_s(spec.step_time, computed, reused, chunk)
    prefills = shapes.chosen(shapes.prompt_tokens > 0)
    first_s = attention_s + np.maximum(
        prefills.seconds.min(), computed * float((prefills.seconds / prefills.prompt_tokens).min())
    )
    tpot_slo_s = levels.tpot_slo_s[due]
    left_s = levels.ttft_slo_s[due] - first_s
    patience_s = np.where(np.isnan(tpot_slo_s), np.inf, left_s + decodes * tpot_slo_s)
    fastest_s = float(shapes.seconds[shapes.decodes > 0].min())
    needs = RequestNeeds(
        decodes=decodes,
        prompt_tokens=computed,
        context_tokens=decodes * prompts + decodes * (decodes + 1) / 2,
        attention_s=attention_s,
        patience_s=patience_s,
        tpot_slo_s=tpot_slo_s,
        is_possible=(room > 0) & (left_s >= 0) & (patience_s >= decodes * fastest_s),
    )
    return needs, shapes


def _reused_tokens(lengths: RequestLengths) -> Floats:
    """Return the prompt tokens whose content an earlier prompt has as well."""
    reused = np.zeros(len(lengths))
    if lengths.num_contents == 0:
        return reused
    seen = np.zeros(lengths.num_contents, np.bool_)
    for number, (first, last) in enumerate(zip(lengths.first_content, lengths.first_content[1:], strict=False)):
        own = lengths.contents[first:last]
        known = seen[own]
        depth = len(own) if known.all() else int(known.argmin())
        reused[number] = min(depth * lengths.block_tokens, int(lengths.prompt_tokens[number]) - 1)
        seen[own] = True
    return reused


def _prefill_attention_s(step_time: StepTime, computed: Floats, reused: Floats, chunk: int) -> Floats:
    """Return the least seconds of attention of prompts, however they are split into chunks of at most `chunk`."""
    pair_s = step_time.prefill_qkv_s + least_prefill_per_pair(step_time, chunk)
    pairs = pair_s * (computed**2 / 2 + computed * reused)
    squares = step_time.prefill_qq_s - step_time.prefill_qkv_s / 2  # per square of the length of a chunk
    least = computed if squares >= 0 else computed * np.minimum(computed, chunk)
    return np.maximum(0.0, pairs + squares * least)
