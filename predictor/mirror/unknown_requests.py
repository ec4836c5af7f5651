"""Requests that bypass the proxy; only the engine's metrics show them."""

from __future__ import annotations

from collections import deque

from predictor.lengths import Tag
from predictor.mirror.tracker import Tracker
from predictor.request import RequestFacts
from predictor.reserved_requests import Length

MAX_REQUESTS = 256
NUM_SCRAPES = 3  # in a row that must show an unknown request: the proxy may report a new one a moment later
DEFAULT_PROMPT_TOKENS = 128
LENGTH = Tag(median_tokens=256.0, spread=1.0)  # of an answer about which nothing is known


class UnknownRequests:
    """Adds requests to the model for those that the metrics show beyond the known ones, with the blocks they hold."""

    def __init__(self, tracker: Tracker) -> None:
        """Start with no unknown requests."""
        self._tracker = tracker
        self._names: list[str] = []
        self._serial = 0
        self._counts: deque[int] = deque(maxlen=NUM_SCRAPES)

    def __len__(self) -> int:
        """Return the number of unknown requests in the model."""
        return len(self._names)

    def lengths(self) -> dict[str, Length]:
        """Return the predicted lengths of their answers."""
        return dict.fromkeys(self._names, (0, LENGTH))

    def update(self, num_running: int, num_waiting: int, kv_usage: float | None, now_s: float) -> None:
        """Take the engine's counts of all requests; add or remove unknown requests accordingly."""
        tracker = self._tracker
        self._names = [name for name in self._names if name in tracker]
        num_known = len(tracker.requests) - len(self._names)
        self._counts.append(max(0, num_running + num_waiting - num_known))
        is_settled = len(self._counts) == NUM_SCRAPES
        wanted = min(MAX_REQUESTS, min(self._counts) if is_settled else len(self._names), self._counts[-1])
        while len(self._names) > wanted:
            tracker.remove(self._names.pop(), now_s)
        num_new = wanted - len(self._names)
        if num_new > 0:
            num_new_waiting = min(num_new, max(0, num_waiting - tracker.engine.num_waiting))
            self._add(num_new - num_new_waiting, num_new_waiting, kv_usage, now_s)

    def _add(self, num_running: int, num_waiting: int, kv_usage: float | None, now_s: float) -> None:
        tracker, engine = self._tracker, self._tracker.engine
        config = engine.config
        tokens = DEFAULT_PROMPT_TOKENS
        if kv_usage is not None and num_running:
            num_unknown_blocks = round(kv_usage * engine.num_blocks) - engine.num_held_blocks()
            tokens = max(1, num_unknown_blocks * config.block_size // num_running)
        tokens = min(tokens, config.max_model_len // 2, engine.num_blocks * config.block_size // 2)
        for number in range(num_running + num_waiting):
            self._serial += 1
            name = f"unknown-{self._serial:08x}"
            prompt_tokens = max(1, tokens)
            room = min(config.max_model_len, engine.num_blocks * config.block_size) - prompt_tokens
            if room < 1:
                return
            tracker.add(
                RequestFacts(request_id=name, prompt_tokens=prompt_tokens, max_tokens=room, arrival_s=now_s),
                streamed=False,
            )
            self._names.append(name)
            if number < num_running:
                tracker.set_running(name, 1)
