"""An engine model that is corrected while it runs: steps end when observed, requests move, blocks are recounted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from predictor import remote_kv
from predictor.compiled import direct
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.reported_state import ReportedState, ReportedStep
from predictor.reported_transfers import fetch_starts
from predictor.request import RequestFacts
from predictor.reserved_requests import Length
from predictor.snapshot import Snapshot
from predictor.snapshot_of_engine import snapshot_of
from predictor.state import (
    FETCHING,
    FINISHED,
    HELD,
    NO_TRANSFER,
    NONE,
    PENDING,
    RUNNING,
    SHOWN_STAGES,
    TO_FETCH,
    WAITING,
)
from predictor.step_time import StepTime

end_transfer = direct(remote_kv.end_transfer)

EXTRA_TOKENS = 32  # assumed to follow when a request continues past its predicted end
# Of the `live` records: not read where blocks are not tracked, or set from transfers.
OTHER_COLUMNS = ("serial", "num_hashes", "unused", "stage", "fetch_started_s", "fetch_ended_s", "held_until_s")
FACTS = ("arrival_s", "priority", "prompt_tokens", "max_tokens", "leg")
NO_LENGTH: Length = (0, None)


class PlannedStep(NamedTuple):
    """When a step starts and ends in the model; `profile_s` is its duration without the correction of the pace."""

    start_s: float
    end_s: float
    profile_s: float


class ShownRecords(NamedTuple):
    """The record types of `ReportedState.live` and `ReportedState.facts`; one pair for the whole process."""

    live: np.dtype[Any]
    facts: np.dtype[Any]


class EditableEngine(Engine):
    """An engine model with named corrections; it does not know what its KV blocks hold.

    `rewind_steps` comes before an edit that changes which steps are possible: `correct_prompt`, `promote_to_running`
    and `demote_to_waiting`. After it, `recount_blocks` and `plan_step` bring the model back to a consistent state.
    """

    def __init__(self, config: EngineConfig, step_time: StepTime, now_s: float) -> None:
        """Make an idle engine whose clock shows `now_s`."""
        super().__init__(config, step_time, track_blocks=False)
        self._visible = np.zeros(len(self.state.requests), np.bool_)  # by slot
        self.state.engine[0].now_s = now_s

    # Queues.

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return int(self.state.engine[0].num_running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, including those that have not arrived yet."""
        head = self.state.engine[0]
        return int(head.num_waiting + head.num_pending)

    # Steps.

    @property
    def num_steps_under_way(self) -> int:
        """Number of steps that are planned and have not ended."""
        return int(self.state.engine[0].num_in_flight)

    def oldest_step(self) -> PlannedStep:
        """Return the oldest step under way."""
        return self._step(0)

    def plan_step(self, until_s: float) -> PlannedStep | None:
        """Advance to `until_s`, or until one more step is planned; return that step, if any."""
        head = self.state.engine[0]
        before = int(head.num_steps)
        head.steady = 0  # a batch of repeated steps could not be ended step by step
        self.drive(self.state, until_s, before + 1, NONE)
        # a request that shared blocks returns more than it held
        head.num_free_blocks = min(int(head.num_free_blocks), self.num_blocks)
        return None if int(head.num_steps) == before else self._step(self.num_steps_under_way - 1)

    def end_oldest_step(self, now_s: float) -> None:
        """Let the oldest step under way end now; the step behind it starts now and keeps its duration."""
        head, steps = self.state.engine[0], self.state.steps
        steps[head.oldest].end_s = now_s
        if head.num_in_flight > 1:
            younger = steps[(head.oldest + 1) % 2]
            younger.end_s = now_s + max(0.0, float(younger.end_s - younger.start_s))
            younger.start_s = now_s

    def rewind_steps(self) -> None:
        """Undo the planning of all steps under way."""
        state = self.state
        head, rows = state.engine[0], state.requests
        for ahead in reversed(range(int(head.num_in_flight))):
            index = (int(head.oldest) + ahead) % 2
            for entry in state.batch[index, : state.steps[index].num_scheduled]:
                row = rows[entry.slot]
                row.in_flight_tokens -= entry.tokens
                if row.stale_tokens > 0:
                    row.stale_tokens -= entry.tokens
                elif row.status == RUNNING:
                    row.computed_tokens -= entry.tokens
                    row.draft_tokens = entry.drafts
                    if entry.sampled and head.pipeline_depth > 1:
                        row.placeholders -= 1 + entry.drafts
        head.num_in_flight = 0
        head.steady = head.stuck = 0

    def skip_idle_time(self, now_s: float) -> None:
        """Advance the clock of an engine without a step under way."""
        head = self.state.engine[0]
        if head.num_in_flight == 0:
            head.now_s = max(head.now_s, now_s)

    def num_tokens_of_oldest_step(self) -> float:
        """Return how many output tokens the oldest step under way produces, accepted draft tokens as expected."""
        if not self.num_steps_under_way:
            return 0.0
        entries = self._entries(0)
        return float((entries["sampled"] * (1 + self.state.expected_accepted[entries["drafts"]])).sum())

    def will_produce_token(self, request_id: str) -> bool:
        """Return whether a step under way produces a token of a request."""
        slot = self.slots[request_id]
        for ahead in range(self.num_steps_under_way):
            entries = self._entries(ahead)
            if ((entries["slot"] == slot) & (entries["sampled"] != 0)).any():
                return True
        return False

    def oldest_step_is_visible(self) -> bool:
        """Return whether the oldest step under way produces a token that is observed outside.

        Every token of a visible request is observed; of any other request, only the last one.
        """
        if not self.num_steps_under_way:
            return False
        entries = self._entries(0)
        slots = entries["slot"]
        rows = self.state.requests.view(np.ndarray)[slots]
        is_seen = self._visible[slots] | (rows["output_tokens"] + 1 >= rows["final_tokens"])
        return bool((is_seen & (entries["sampled"] != 0) & (rows["status"] != FINISHED)).any())

    def _step(self, ahead: int) -> PlannedStep:
        head = self.state.engine[0]
        step = self.state.steps[(head.oldest + ahead) % 2]
        start_s, end_s = float(step.start_s), float(step.end_s)
        return PlannedStep(start_s, end_s, (end_s - start_s) / float(head.pace))

    def _entries(self, ahead: int) -> np.ndarray:
        """Return what a step under way schedules."""
        index = (int(self.state.engine[0].oldest) + ahead) % 2
        entries: np.ndarray = self.state.batch.view(np.ndarray)[index, : int(self.state.steps[index].num_scheduled)]
        return entries

    # One request.

    def mark_visible(self, request_id: str, *, visible: bool) -> None:
        """Set whether every token of a request is observed outside."""
        missing = len(self.state.requests) - len(self._visible)
        if missing > 0:
            self._visible = np.concatenate((self._visible, np.zeros(missing, np.bool_)))
        self._visible[self.slots[request_id]] = visible

    def is_visible(self, request_id: str) -> bool:
        """Return whether every token of a request is observed outside."""
        return bool(self._visible[self.slots[request_id]])

    def is_running(self, request_id: str) -> bool:
        """Return whether a request is running."""
        return bool(self._row(request_id).status == RUNNING)

    def is_finished(self, request_id: str) -> bool:
        """Return whether a request has ended."""
        return bool(self._row(request_id).status == FINISHED)

    def is_scheduled(self, request_id: str) -> bool:
        """Return whether a step under way computes tokens of a request."""
        return bool(self._row(request_id).in_flight_tokens > 0)

    def output_tokens(self, request_id: str) -> int:
        """Return how many tokens a request has produced."""
        return int(self._row(request_id).output_tokens)

    def max_tokens(self, request_id: str) -> int:
        """Return the length at which the engine ends an answer at the latest."""
        return int(self._row(request_id).max_tokens)

    def predicted_tokens(self, request_id: str) -> int:
        """Return the length at which an answer ends in the model."""
        return int(self._row(request_id).final_tokens)

    def first_token_s(self, request_id: str) -> float:
        """Return when a request produced its first token."""
        return float(self._row(request_id).first_token_s)

    def end_answer_at(self, request_id: str, num_tokens: int) -> None:
        """Let an answer end at `num_tokens`."""
        self._row(request_id).final_tokens = num_tokens

    def discard_output(self, request_id: str) -> int:
        """Let a request have produced no tokens; return how many it had."""
        row = self._row(request_id)
        num_tokens = int(row.output_tokens)
        row.output_tokens = 0
        return num_tokens

    def can_correct_prompt(self, request_id: str, prompt_tokens: int) -> bool:
        """Return whether a request has another prompt length, may have this one, and still computes its prompt."""
        row = self._row(request_id)
        if row.prompt_tokens == prompt_tokens or row.status == FINISHED or row.output_tokens > 0:
            return False
        has_room = self.config.max_model_len > prompt_tokens
        return has_room and -(-prompt_tokens // self.config.block_size) <= self.num_blocks

    def correct_prompt(self, request_id: str, prompt_tokens: int) -> None:
        """Set the prompt length of a request that still computes its prompt; no step may be under way."""
        row = self._row(request_id)
        is_fetching = remote_kv.is_under_way(int(row.stage))  # all of the prompt
        computed_tokens = prompt_tokens if is_fetching else min(int(row.computed_tokens), prompt_tokens - 1)
        row.prompt_tokens = prompt_tokens
        row.computed_tokens = computed_tokens
        row.num_blocks = -(-computed_tokens // self.config.block_size)
        row.max_tokens = min(row.max_tokens, self.config.max_model_len - prompt_tokens)
        row.final_tokens = min(row.final_tokens, row.max_tokens)
        if row.status == RUNNING:
            row.prefill_tokens = prompt_tokens

    def num_known_tokens(self, request_id: str) -> int:
        """Return how many tokens a request has: its prompt, and what it has produced."""
        row = self._row(request_id)
        return int(row.prompt_tokens + row.output_tokens)

    def num_computed_tokens(self, request_id: str) -> int:
        """Return how many tokens of a running request are computed, or in a step under way; 0 where it waits."""
        row = self._row(request_id)
        return int(min(row.computed_tokens, row.prompt_tokens + row.output_tokens)) if row.status == RUNNING else 0

    def was_preempted(self, request_id: str) -> bool:
        """Return whether a request was preempted."""
        return bool(self._row(request_id).num_preemptions > 0)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return int(self.state.engine[0].num_preemptions)

    def can_set_hits(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a request runs, computes its prompt, and has started with fewer cached tokens."""
        row = self._row(request_id)
        before = row.computed_tokens - row.in_flight_tokens
        return bool(row.status == RUNNING and before < num_tokens < row.prompt_tokens + row.output_tokens)

    def set_hits(self, request_id: str, num_tokens: int) -> None:
        """Let a running request have found `num_tokens` of its prompt in the cache; no step may be under way."""
        row = self._row(request_id)
        row.computed_tokens = row.hit_tokens = num_tokens
        row.num_blocks = -(-num_tokens // self.config.block_size)

    def promote_to_running(self, request_id: str, num_tokens: int) -> None:
        """Let a request run with `num_tokens` produced and all tokens before computed; no step may be under way."""
        state, slot = self.state, self.slots[request_id]
        head, row = state.engine[0], state.requests[slot]
        if row.status != RUNNING:
            if remote_kv.is_under_way(int(row.stage)):
                end_transfer(state, slot, float(head.now_s))
            row.stage = NO_TRANSFER
            self._remove_from_queues(slot)
            if row.status in (PENDING, WAITING, FINISHED):
                state.running[head.num_running] = slot
                head.num_running += 1
            row.status = RUNNING
            row.prefill_tokens = row.prompt_tokens + row.output_tokens
        # more tokens than fit the model show that the prompt was estimated too long
        num_tokens = min(num_tokens, self.config.max_model_len - 2)
        row.prompt_tokens = min(row.prompt_tokens, self.config.max_model_len - num_tokens - 1)
        row.output_tokens = num_tokens
        row.placeholders = row.stale_tokens = 0
        row.computed_tokens = row.prompt_tokens + num_tokens - 1 if num_tokens else 0
        row.num_blocks = -(-row.computed_tokens // self.config.block_size)
        if row.final_tokens <= num_tokens:  # it continues past its predicted end
            row.final_tokens = min(num_tokens + EXTRA_TOKENS, self.config.max_model_len - row.prompt_tokens)
            row.max_tokens = max(row.max_tokens, row.final_tokens)
        row.scheduled_s = row.scheduled_s if row.scheduled_s >= 0 else head.now_s
        if num_tokens and row.first_token_s < 0:
            row.first_token_s = head.now_s

    def demote_to_waiting(self, request_id: str) -> None:
        """Put a running request before all that wait without blocks; no step may be under way."""
        state, slot = self.state, self.slots[request_id]
        head, row = state.engine[0], state.requests[slot]
        if row.status != RUNNING:
            return
        self._remove_from_queues(slot)
        row.status = WAITING
        row.computed_tokens = row.num_blocks = row.placeholders = row.stale_tokens = 0
        head.waiting_head = (int(head.waiting_head) - 1) % len(state.waiting)
        head.num_waiting += 1
        places = (int(head.waiting_head) + np.arange(int(head.num_holding) + 1)) % len(state.waiting)
        state.waiting[places[:-1]] = state.waiting[places[1:]]
        state.waiting[places[-1]] = slot

    def _row(self, request_id: str) -> np.record:
        row: np.record = self.state.requests[self.slots[request_id]]
        return row

    def _remove_from_queues(self, slot: int) -> None:
        state = self.state
        head = state.engine[0]
        running = [int(one) for one in state.running[: head.num_running] if one != slot]
        state.running[: len(running)] = running
        head.num_running = len(running)
        holding = _ring(state.waiting, int(head.waiting_head), int(head.num_holding))
        head.num_holding -= np.count_nonzero(holding == slot)
        head.num_waiting = _remove_from_ring(state.waiting, int(head.waiting_head), int(head.num_waiting), slot)
        head.num_pending = _remove_from_ring(state.pending, int(head.pending_head), int(head.num_pending), slot)

    # KV blocks.

    def num_held_blocks(self) -> int:
        """Return how many blocks the known requests hold: those that run, and those whose blocks are fetched."""
        state, head = self.state, self.state.engine[0]
        waiting = _ring(state.waiting, int(head.waiting_head), int(head.num_waiting))
        slots = np.concatenate((state.running[: head.num_running], waiting))
        return int(state.requests["num_blocks"][slots].sum())

    def recount_blocks(self, num_held_elsewhere: int) -> int:
        """Set the number of free blocks from what running requests hold, and unknown holders; return the former.

        A negative `num_held_elsewhere` is the number of blocks that requests share.
        """
        head, held = self.state.engine[0], self.num_held_blocks()
        head.num_free_blocks = min(self.num_blocks, max(0, self.num_blocks - held - num_held_elsewhere))
        head.steady = head.stuck = 0
        return held

    # The whole model, for others.

    def shown(
        self, records: ShownRecords, lengths: Mapping[str, Length], now_s: float, max_requests: int
    ) -> ReportedState:
        """Return the state for an engine replica; `lengths` has the predicted lengths by request id."""
        head, rows = self.state.engine[0], self.state.requests.view(np.ndarray)
        queued, held = self._shown_slots(max_requests)
        slots = np.concatenate((queued, held))[:max_requests]
        num, num_running = len(slots), min(self.num_running, len(queued))
        live, facts = np.zeros(num, records.live), np.zeros(num, records.facts)
        for name in records.live.names or ():
            if name not in OTHER_COLUMNS:
                live[name] = rows[name][slots]
        self._show_transfers(live, slots, now_s)
        for name in FACTS:
            facts[name] = rows[name][slots]
        for name in self.state.facts.dtype.names or ():
            if name in (records.facts.names or ()):
                facts[name] = self.state.facts[name][slots]
        known, median, spread = np.zeros(num, np.int64), np.full(num, np.nan), np.zeros(num)
        for index, slot in enumerate(slots.tolist()):
            known[index], tag = lengths.get(self.id_of(slot), NO_LENGTH)
            if tag is not None:
                median[index], spread[index] = tag.median_tokens, tag.spread
        indices = np.full(len(rows), -1)
        indices[slots] = np.arange(num)
        return ReportedState(
            now_s=now_s,
            num_free_blocks=int(head.num_free_blocks),
            decodes_since_look=int(head.decodes_since_look),
            running=np.arange(num_running),
            waiting=np.arange(num_running, len(queued)),
            held=np.arange(len(queued), num),
            steps=tuple(self._shown_step(ahead, indices) for ahead in range(int(head.num_in_flight))),
            live=live,
            facts=facts,
            known_tokens=known,
            tag_median=median,
            tag_spread=spread,
        )

    def shown_requests(self, max_requests: int) -> list[str]:
        """Return the ids of the requests that `shown` contains, in its order, without those that have ended."""
        return [self.id_of(slot) for slot in self._shown_slots(max_requests)[0].tolist()]

    def _shown_slots(self, max_requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the requests that run or wait, and of those that have ended while blocks are held."""
        state = self.state
        head, rows = state.engine[0], state.requests.view(np.ndarray)
        waiting = _ring(state.waiting, int(head.waiting_head), int(head.num_waiting))
        pending = _ring(state.pending, int(head.pending_head), int(head.num_pending))
        transfers = state.transfers[: head.num_transfers]
        held = transfers[rows["status"][transfers] == FINISHED]
        queued = np.concatenate((state.running[: head.num_running], waiting, pending))
        return queued[: max(0, max_requests - len(held))].astype(np.int64), held

    def _show_transfers(self, live: np.ndarray, slots: np.ndarray, now_s: float) -> None:
        """Write the stages of transfers, and their times so that they end as in the model."""
        rows = self.state.requests
        live["stage"] = np.take(SHOWN_STAGES, rows["stage"][slots])
        for name in ("fetch_started_s", "fetch_ended_s", "held_until_s"):
            live[name] = NONE
        shared = bool(self.state.engine[0].transfer_shared)
        num_sharing = max(1, int(self.state.engine[0].num_fetching)) if shared else 1
        got_s: dict[int, float] = {}
        for index in np.flatnonzero(live["stage"] > TO_FETCH).tolist():
            slot = int(slots[index])
            end_s = float(remote_kv.end_at_present_rate_s(self.state, slot))
            if live["stage"][index] == FETCHING:
                left_s = max(0.0, end_s - now_s) / num_sharing
                got_s[index] = remote_kv.missing_seconds(self.state, slot) - left_s
            elif live["stage"][index] == HELD:
                live["held_until_s"][index] = end_s
            else:
                live["fetch_ended_s"][index] = end_s
        live["fetch_started_s"][list(got_s)] = fetch_starts(list(got_s.values()), now_s, shared=shared)

    def _shown_step(self, ahead: int, indices: np.ndarray) -> ReportedStep:
        entries = self._entries(ahead)
        status = self.state.requests["status"][entries["slot"]]
        entries = entries[((status == RUNNING) | (status == WAITING)) & (indices[entries["slot"]] >= 0)]
        return ReportedStep(
            start_s=self._step(ahead).start_s,
            slots=indices[entries["slot"]],
            tokens=entries["tokens"],
            sampled=entries["sampled"],
            drafts=entries["drafts"],
        )

    def snapshot(self, lengths: Mapping[str, Length], reserved: tuple[RequestFacts, ...], now_s: float) -> Snapshot:
        """Return the model as a snapshot, with predicted lengths by request id, and with more reserved requests."""
        for slot in self.slots.values():  # requests keep their corrected lengths
            row, request = self.state.requests[slot], self.request_in(slot)
            prompt_tokens, max_tokens = int(row.prompt_tokens), int(row.max_tokens)
            if (request.prompt_tokens, request.max_tokens) != (prompt_tokens, max_tokens):
                self._requests[slot] = replace(request, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        snapshot = snapshot_of(self, now_s)
        return replace(
            snapshot,
            running=tuple(replace(one, request=_with_length(one.request, lengths)) for one in snapshot.running),
            waiting=tuple(replace(one, request=_with_length(one.request, lengths)) for one in snapshot.waiting),
            reserved=(*(_with_length(one, lengths) for one in snapshot.reserved), *reserved),
        )


def _ring(ring: np.ndarray, head: int, length: int) -> np.ndarray:
    slots: np.ndarray = ring[(head + np.arange(length)) % len(ring)]
    return slots


def _remove_from_ring(ring: np.ndarray, head: int, length: int, slot: int) -> int:
    """Remove a slot from a ring and close the gap; return how many slots are left."""
    positions = (head + np.arange(length)) % len(ring)
    kept = [one for one in ring[positions] if one != slot]
    ring[positions[: len(kept)]] = kept
    return len(kept)


def _with_length(request: RequestFacts, lengths: Mapping[str, Length]) -> RequestFacts:
    tokens, tag = lengths.get(request.request_id, NO_LENGTH)
    return replace(request, output_tokens=tokens or None, tag=tag)
