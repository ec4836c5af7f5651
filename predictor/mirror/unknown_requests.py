"""Requests that came to the engine by another way than the proxy: only its totals tell of them."""

from __future__ import annotations

from collections import deque

from predictor.lengths import Tag
from predictor.mirror.tracker import Tracker
from predictor.request import Request
from predictor.reserved_requests import Length

MOST = 256
READINGS = 3  # in a row that must show a stranger: one request more may just be on its way
USUAL_PROMPT_TOKENS = 128
LENGTH = Tag(median_tokens=256.0, spread=1.0)  # nobody knows


class UnknownRequests:
    """Stand-ins for unknown requests in the model: as many as the totals show, holding what blocks nobody else does."""

    def __init__(self, tracker: Tracker) -> None:
        """Know of none."""
        self._tracker = tracker
        self._names: list[str] = []
        self._serial = 0
        self._counts: deque[int] = deque(maxlen=READINGS)

    def __len__(self) -> int:
        """How many there seem to be."""
        return len(self._names)

    def lengths(self) -> dict[str, Length]:
        """How long their answers are thought to be."""
        return dict.fromkeys(self._names, (0, LENGTH))

    def suppose(self, num_running: int, num_waiting: int, kv_usage: float | None, now_s: float) -> None:
        """Have as many as the engine has beyond the known ones, by its own count."""
        tracker = self._tracker
        self._names = [name for name in self._names if name in tracker]
        num_known = len(tracker.requests) - len(self._names)
        self._counts.append(max(0, num_running + num_waiting - num_known))
        wanted = min(MOST, min(self._counts) if len(self._counts) == READINGS else len(self._names), self._counts[-1])
        while len(self._names) > wanted:
            tracker.drop(self._names.pop(), now_s)
        num_new = wanted - len(self._names)
        if num_new > 0:
            num_to_wait = min(num_new, max(0, num_waiting - tracker.num_waiting()))
            self._add(num_new - num_to_wait, num_to_wait, kv_usage, now_s)

    def _add(self, num_running: int, num_waiting: int, kv_usage: float | None, now_s: float) -> None:
        tracker = self._tracker
        config = tracker.engine.config
        tokens = USUAL_PROMPT_TOKENS
        if kv_usage is not None and num_running:
            rows, head = tracker.engine.state.requests, tracker.engine.state.engine[0]
            held = int(rows["num_blocks"][tracker.engine.state.running[: head.num_running]].sum())
            strange = round(kv_usage * tracker.engine.num_blocks) - held
            tokens = max(1, strange * config.block_size // num_running)
        tokens = min(tokens, config.max_model_len // 2, tracker.engine.num_blocks * config.block_size // 2)
        for place in range(num_running + num_waiting):
            self._serial += 1
            name = f"unknown-{self._serial:08x}"
            prompt_tokens = max(1, tokens)
            room = min(config.max_model_len, tracker.engine.num_blocks * config.block_size) - prompt_tokens
            if room < 1:
                return
            tracker.add(
                Request(request_id=name, prompt_tokens=prompt_tokens, max_tokens=room, arrival_s=now_s), streamed=False
            )
            self._names.append(name)
            if place < num_running:
                tracker.enter(name, 1)
