"""The tail of what is decided: placements, outcomes and indicators, for those who watch.

Nothing is kept while no page is open. What readers get is bounded: of many requests between frames the last ones are
shown, and a reader that is too slow misses frames and then starts over with the whole state.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2
from scheduler.placement import Placement
from services.placement.decision_log import DecisionLog
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry
from services.placement.listeners import PlacementListener
from services.placement.provisioner_watch import ProvisionerWatch
from services.placement.tail_records import (
    COUNTERS,
    Record,
    counter_records,
    ended_record,
    instance_record,
    logged_record,
    placed_record,
)
from services.rpc.errors import BusyError
from services.supervised_task import supervised

FRAME_S = 0.25  # between two frames
COUNTERS_EVERY = 4  # frames
REPORT_S = 0.25  # between two reports of an instance while somebody watches
MAX_REPORTS_PER_S = 100  # of all instances together
MAX_PLACED = 32  # requests in one frame
MAX_REPORTED = 32  # instances in one frame whose numbers have changed; those whose state has changed are in any case
MAX_ENDED = 512
MAX_SHOWN = 600  # requests that a reader gets at first
MAX_KNOWN = 4000  # whose ends are passed on; a page keeps as many
MAX_FRAMES = 16  # that wait for a slow reader
MAX_READERS = 16


class UnsentPlacement(NamedTuple):
    """A placed request, until the next frame."""

    request: common_pb2.Request
    message: common_pb2.Decision
    waited_s: float


class SentInstance(NamedTuple):
    """What a reader knows of an instance: its state, and how old its numbers are."""

    state: tuple[Any, ...]
    reported_s: float

    @classmethod
    def of(cls, handle: InstanceHandle) -> SentInstance:
        """Return what a frame would say now."""
        status = handle.status
        state = (handle.message, status.is_healthy, status.reported_state, handle.is_silent)
        return cls(state, status.reported_s)


class TailReader:
    """The frames of one reader; one that falls behind gets the whole state again."""

    def __init__(self, whole: Callable[[], bytes]) -> None:
        """Start with the whole state."""
        self._whole = whole
        self._frames: deque[bytes] = deque([whole()])
        self._has_frames = asyncio.Event()
        self._has_frames.set()
        self._is_behind = False

    def put(self, frame: bytes) -> None:
        """Add a frame, or note that the reader does not keep up."""
        if len(self._frames) >= MAX_FRAMES:
            self._is_behind = True
        else:
            self._frames.append(frame)
        self._has_frames.set()

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames until the caller stops."""
        while True:
            await self._has_frames.wait()
            if self._is_behind:
                self._frames.clear()
                self._is_behind = False
                yield self._whole()
            elif self._frames:
                yield self._frames.popleft()
            else:
                self._has_frames.clear()


class Tail(PlacementListener):
    """Follows a placement driver while somebody watches."""

    def __init__(
        self,
        instances: InstanceRegistry,
        log: DecisionLog,
        metrics: CollectorRegistry,
        about: Callable[[], Record],
        provisioners: ProvisionerWatch | None = None,
    ) -> None:
        """Read instances, past decisions and counters; `about` gives what else a frame says of the scheduler."""
        self._instances = instances
        self._log = log
        self._counters = metrics.restricted_registry(COUNTERS)
        self._about = about
        self._provisioners = provisioners or ProvisionerWatch([])
        self._readers: set[TailReader] = set()
        self._placed: deque[UnsentPlacement] = deque(maxlen=MAX_PLACED)
        self._ended: deque[common_pb2.Outcome] = deque(maxlen=MAX_ENDED)
        self._num_placed = 0  # since the last frame
        self._shown: dict[str, Record] = {}  # by request id
        self._sent: dict[str, SentInstance] = {}  # what readers know of each instance, the longest ago first
        self._num_frames = 0
        self._tasks: list[asyncio.Task[None]] = []  # that run while somebody watches

    def __len__(self) -> int:
        """Return the number of readers."""
        return len(self._readers)

    # What happens.

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Note a placement."""
        del placement
        if self._readers:
            self._num_placed += 1
            self._placed.append(UnsentPlacement(request, message, request.waited_s))

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Note an outcome."""
        if self._readers:
            self._ended.append(outcome)

    def on_release(self, request_id: str, instance_id: str) -> None:
        """Note the end of a request whose outcome is unknown."""
        if self._readers:
            self._ended.append(common_pb2.Outcome(request_id=request_id, instance_id=instance_id))

    # Reading.

    @contextmanager
    def watched(self) -> Iterator[TailReader]:
        """Watch while the block runs."""
        if len(self._readers) >= MAX_READERS:
            raise BusyError(f"{MAX_READERS} readers watch already, which is the limit")
        if not self._readers:
            self._start()
        reader = TailReader(self._whole)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._stop()

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Return a past decision with its candidates; UnknownNameError where it is not kept."""
        return self._log.explained(request_id)

    def _start(self) -> None:
        for logged in self._log.last(MAX_SHOWN):
            self._show({**logged_record(logged), "is_old": True})  # it may have ended, which is unknown here
        self._instances.show_every(max(REPORT_S, len(self._instances.handles()) / MAX_REPORTS_PER_S))
        self._tasks = [
            asyncio.create_task(supervised(name, work))
            for name, work in (("live page", self._pump), ("provisioners of the live page", self._provisioners.follow))
        ]

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._instances.show_every(None)
        for kept in (self._placed, self._ended, self._shown, self._sent):
            kept.clear()
        self._num_placed = 0

    async def close(self) -> None:
        """Stop, whoever watches."""
        tasks = self._tasks
        self._readers.clear()
        self._stop()
        if tasks:
            await asyncio.wait(tasks)

    # Frames.

    async def _pump(self) -> None:
        while True:
            await asyncio.sleep(FRAME_S)
            frame = self._frame()
            for reader in self._readers:
                reader.put(frame)

    def _frame(self) -> bytes:
        """Return what has changed since the last frame."""
        self._num_frames += 1
        frame: Record = {"now": time.time(), **self._changes()}
        if self._num_frames % COUNTERS_EVERY == 0:
            frame |= {"counters": counter_records(self._counters.collect()), **self._said()}
        return _encoded(frame)

    def _changes(self) -> Record:
        num_left_out = self._num_placed - len(self._placed)
        placed = [placed_record(*one) for one in self._placed]
        for record in placed:
            self._show(record)
        ended = []
        for outcome in self._ended:
            known = self._shown.get(outcome.request_id)
            if known is not None:
                record = ended_record(outcome)
                known.update(record)
                ended.append(record)
        self._placed.clear()
        self._ended.clear()
        self._num_placed = 0
        changed, gone = self._changed_instances()
        found = {"placed": placed, "ended": ended, "instances": changed, "gone": gone, "left_out": num_left_out}
        return {name: value for name, value in found.items() if value}

    def _changed_instances(self) -> tuple[list[Record], list[str]]:
        """Return the instances with another state, some of those with other numbers, and the names of those gone."""
        now_s = time.monotonic()
        handles = {handle.name: handle for handle in self._instances.handles()}
        gone = self._sent.keys() - handles.keys()
        for name in gone:
            del self._sent[name]
        seen = {name: SentInstance.of(handle) for name, handle in handles.items()}
        changed = [name for name, one in seen.items() if name not in self._sent or self._sent[name].state != one.state]
        reported = (name for name, sent in self._sent.items() if sent.reported_s != seen[name].reported_s)
        changed = list(dict.fromkeys([*changed, *islice(reported, MAX_REPORTED)]))
        for name in changed:
            self._sent.pop(name, None)
            self._sent[name] = seen[name]
        return [instance_record(handles[name], now_s) for name in changed], sorted(gone)

    def _whole(self) -> bytes:
        """Return all that is known, in place of what a reader has."""
        now_s = time.monotonic()
        return _encoded({
            "reset": True,
            "now": time.time(),
            "instances": [instance_record(one, now_s) for one in self._instances.handles()],
            "placed": list(islice(reversed(self._shown.values()), MAX_SHOWN))[::-1],
            "counters": counter_records(self._counters.collect()),
            **self._said(),
        })  # fmt: skip

    def _said(self) -> Record:
        record = self._provisioners.record
        return self._about() if record is None else {**self._about(), "provisioning": record}

    def _show(self, record: Record) -> None:
        self._shown.pop(record["id"], None)
        self._shown[record["id"]] = record
        if len(self._shown) > MAX_KNOWN:
            del self._shown[next(iter(self._shown))]


def _encoded(frame: Record) -> bytes:
    return json.dumps(frame, separators=(",", ":"), allow_nan=False).encode()
