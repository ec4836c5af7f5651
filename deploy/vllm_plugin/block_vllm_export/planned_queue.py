"""The waiting queue of a scheduler with a batching rule: a planned step sees only the requests that it may admit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class PlannedQueue(RequestQueue):
    """Requests in the order of their arrival, or of vLLM's priorities; any of them is removed in constant time."""

    def __init__(self, requests: Iterable[Any], *, by_priority: bool) -> None:
        """Take over the requests of another queue."""
        self._requests: OrderedDict[Any, None] = OrderedDict.fromkeys(requests)
        self._by_priority = by_priority
        self._admitted: deque[Any] | None = None

    def show(self, admitted: Iterable[Any] | None) -> None:
        """Show these requests alone to the scheduler's loop; None: all."""
        self._admitted = None if admitted is None else deque(admitted)

    def add_request(self, request: Any) -> None:
        """Add a request that has arrived."""
        self._requests[request] = None

    def prepend_request(self, request: Any) -> None:
        """Add a request at the front."""
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests at the front, the last one first."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        """Return the next request."""
        if self._admitted is not None:
            return self._admitted[0]
        return next(iter(self))

    def pop_request(self) -> Any:
        """Remove and return the next request."""
        request = self.peek_request()
        self.remove_request(request)
        if self._admitted is not None:
            self._admitted.popleft()
        return request

    def remove_request(self, request: Any) -> None:
        """Remove a request."""
        del self._requests[request]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that are here."""
        for request in requests:
            self._requests.pop(request, None)

    def __bool__(self) -> bool:
        """Return whether the loop has anyone to admit."""
        return bool(self._requests if self._admitted is None else self._admitted)

    def __len__(self) -> int:
        """Return the number of all requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all requests in their order."""
        return iter(sorted(self._requests) if self._by_priority else self._requests)
