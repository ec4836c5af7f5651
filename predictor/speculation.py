"""Speculative decoding: what each method reserves, and how many draft tokens an engine accepts, learnt online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MAX_SPECULATIVE_TOKENS = 32
DRAFT_MODEL, EAGLE, MTP, NGRAM = "draft_model", "eagle", "mtp", "ngram"
HALF_LIFE = 4_000.0  # drafts after which an observation counts half
PRIOR_DRAFTS = 20.0  # drafts as which the configured acceptance counts


@dataclass(frozen=True, slots=True)
class SpeculativeMethod:
    """What a method reserves in vLLM's scheduler (0.32 `VllmConfig.num_lookahead_tokens`, `SpeculativeConfig`)."""

    looks_ahead: bool = False  # it writes KV of all draft tokens: their slots are allocated with each step
    draft_slots: int = 0  # input tokens of a step that each request in it uses beside its own
    drops_last_hit: bool = False  # the last block of a prefix hit is computed again, for the draft's hidden states
    proposes_always: bool = True  # otherwise it proposes nothing for some requests of some steps


METHODS = {
    NGRAM: SpeculativeMethod(proposes_always=False),
    DRAFT_MODEL: SpeculativeMethod(looks_ahead=True, draft_slots=1),
    EAGLE: SpeculativeMethod(looks_ahead=True, drops_last_hit=True),
    MTP: SpeculativeMethod(looks_ahead=True, drops_last_hit=True),
}
NO_METHOD = SpeculativeMethod()


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How many draft tokens an engine proposes and accepts, as exponentially weighted counts.

    `accepted` counts by position the draft tokens that were accepted. A draft is what one request had verified in one
    step; `num_chances` counts also the requests of steps for which nothing was proposed.
    """

    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_chances: float = 0.0
    accepted: tuple[float, ...] = ()
    num_seen: int = 0  # drafts, each counted as one

    @property
    def rate(self) -> float:
        """The share of draft tokens that were accepted; NaN without any."""
        return sum(self.accepted) / self.num_draft_tokens if self.num_draft_tokens > 0 else math.nan

    @property
    def mean_drafted(self) -> float:
        """The mean number of tokens of a draft; NaN without any."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts > 0 else math.nan

    @property
    def proposal_share(self) -> float:
        """The share of chances in which a draft was proposed; NaN without any."""
        return min(1.0, self.num_drafts / self.num_chances) if self.num_chances > 0 else math.nan

    def observe(
        self, *, num_drafts: int, num_draft_tokens: int, accepted: Sequence[int], num_chances: int | None = None
    ) -> Acceptance:
        """Return the counts with further drafts; `accepted` counts accepted tokens by their position in the draft.

        `num_chances` counts the requests for which the engine could have proposed a draft; None: unknown.
        """
        require_counts(num_drafts, num_draft_tokens, accepted)
        chances = num_drafts if num_chances is None else num_chances
        kept = 0.5 ** (max(num_drafts, chances) / HALF_LIFE)
        width = max(len(accepted), len(self.accepted))
        old = (*self.accepted, *(0.0,) * (width - len(self.accepted)))
        new = (*accepted, *(0,) * (width - len(accepted)))
        return replace(
            self,
            num_drafts=kept * self.num_drafts + num_drafts,
            num_draft_tokens=kept * self.num_draft_tokens + num_draft_tokens,
            num_chances=kept * self.num_chances + chances,
            accepted=tuple(kept * before + after for before, after in zip(old, new, strict=True)),
            num_seen=self.num_seen + num_drafts,
        )


def require_counts(num_drafts: int, num_draft_tokens: int, accepted: Sequence[int]) -> None:
    """Refuse counts of drafts that no engine can have; the error names the field."""
    if num_drafts < 0:
        raise ValueError(f"num_drafts: must be at least 0, not {num_drafts}")
    if num_draft_tokens < num_drafts:
        raise ValueError(f"num_draft_tokens: {num_draft_tokens} are fewer than num_drafts {num_drafts}")
    before = num_drafts
    for position, count in enumerate(accepted):
        if not 0 <= count <= before:
            raise ValueError(f"accepted.{position}: must lie between 0 and {before}, not {count}")
        before = count
    if sum(accepted) > num_draft_tokens:
        raise ValueError(f"accepted: {sum(accepted)} tokens are more than num_draft_tokens {num_draft_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTotals:
    """Counters of an engine's drafts since its start; `num_chances` is None where the engine does not count them."""

    num_drafts: int
    num_draft_tokens: int
    accepted: tuple[int, ...]
    num_chances: int | None = None

    def since(self, before: DraftTotals) -> DraftTotals | None:
        """Return what was counted in between; None where the engine has restarted."""
        num_chances = None
        if self.num_chances is not None and before.num_chances is not None:
            num_chances = max(self.num_drafts - before.num_drafts, self.num_chances - before.num_chances)
        earlier = (*before.accepted, *(0,) * (len(self.accepted) - len(before.accepted)))
        counted = DraftTotals(
            num_drafts=self.num_drafts - before.num_drafts,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            accepted=tuple(after - one for after, one in zip(self.accepted, earlier, strict=False)),
            num_chances=num_chances,
        )
        is_less = min(counted.num_drafts, counted.num_draft_tokens, *counted.accepted, 0) < 0
        return None if is_less else counted


NO_TOTALS = DraftTotals(num_drafts=0, num_draft_tokens=0, accepted=(), num_chances=0)


class AcceptanceLearner:
    """Learns what an engine accepts from its counters."""

    def __init__(self, assumed: ExpectedDrafts) -> None:
        """Expect what is configured until drafts have been counted."""
        self.expected = assumed
        self._assumed = assumed
        self._acceptance = Acceptance()
        self._totals = NO_TOTALS

    def observe(self, totals: DraftTotals) -> bool:
        """Take the counters as they are now; return whether `expected` has changed."""
        if totals == self._totals:
            return False
        counted = totals.since(self._totals) or totals
        self._totals = totals
        if not counted.num_drafts and not counted.num_chances:
            return False
        self._acceptance = self._acceptance.observe(
            num_drafts=counted.num_drafts,
            num_draft_tokens=counted.num_draft_tokens,
            accepted=counted.accepted,
            num_chances=counted.num_chances,
        )
        self.expected = expected_drafts(self._assumed, self._acceptance)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDrafts:
    """What forecasts assume of drafts: `accepted` is the mean number of accepted tokens by the number drafted."""

    accepted: tuple[float, ...] = (0.0,)
    proposal_share: float = 1.0
    proposed_tokens: int = 0
    num_seen: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Refuse impossible expectations."""
        if not self.accepted or self.accepted[0] != 0:
            raise ValueError("accepted: must start with 0, for no draft token")
        for number, (before, after) in enumerate(zip(self.accepted, self.accepted[1:], strict=False), 1):
            if not before <= after <= before + 1:
                raise ValueError(f"accepted.{number}: must lie between {before} and {before + 1}, not {after}")
        if not 0 <= self.proposal_share <= 1:
            raise ValueError(f"proposal_share: must lie between 0 and 1, not {self.proposal_share}")
        if not 0 <= self.proposed_tokens < len(self.accepted):
            raise ValueError(f"proposed_tokens: must be below {len(self.accepted)}, not {self.proposed_tokens}")

    @property
    def rate(self) -> float:
        """The expected share of accepted tokens in a draft of the usual length."""
        return self.accepted[self.proposed_tokens] / self.proposed_tokens if self.proposed_tokens else 0.0


NO_DRAFTS = ExpectedDrafts()


def configured_drafts(num_speculative_tokens: int, acceptance: float, proposal_share: float) -> ExpectedDrafts:
    """Return what is assumed before anything is learnt: each token is accepted with one probability, after the last."""
    accepted = [0.0]
    for number in range(1, num_speculative_tokens + 1):
        accepted.append(accepted[-1] + acceptance**number)
    return ExpectedDrafts(
        accepted=tuple(accepted), proposal_share=proposal_share, proposed_tokens=num_speculative_tokens
    )


def expected_drafts(assumed: ExpectedDrafts, learnt: Acceptance) -> ExpectedDrafts:
    """Return what forecasts assume: what was learnt, with the configured values as a few drafts before it."""
    most = len(assumed.accepted) - 1
    weight = learnt.num_drafts + PRIOR_DRAFTS
    accepted = [0.0]
    for number in range(1, most + 1):
        count = learnt.accepted[number - 1] if number <= len(learnt.accepted) else 0.0
        prior = assumed.accepted[number] - assumed.accepted[number - 1]
        accepted.append(accepted[-1] + min(1.0, (count + PRIOR_DRAFTS * prior) / weight))
    drafted = (learnt.num_draft_tokens + PRIOR_DRAFTS * assumed.proposed_tokens) / weight
    chances = learnt.num_chances + PRIOR_DRAFTS
    share = (learnt.num_drafts + PRIOR_DRAFTS * assumed.proposal_share) / chances
    return ExpectedDrafts(
        accepted=tuple(accepted),
        proposal_share=min(1.0, share),
        proposed_tokens=min(most, max(1, math.floor(drafted + 0.5))) if most else 0,
        num_seen=learnt.num_seen,
    )


def approximations_of(method: str, drafts: ExpectedDrafts) -> tuple[str, ...]:
    """Return the sentence with which explanations name what forecasts assume of draft tokens; none without them."""
    if not method:
        return ()
    source = f"learnt from {drafts.num_seen:,} drafts" if drafts.num_seen else "as configured, no drafts seen"
    share = f", proposed in {drafts.proposal_share:.2f} of steps" if drafts.proposal_share < 1 else ""
    return (f"speculation ({method}): acceptance {drafts.rate:.2f} {source}{share}",)
