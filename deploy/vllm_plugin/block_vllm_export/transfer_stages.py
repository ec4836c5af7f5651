"""The KV blocks that requests fetch from other engines, as vLLM's scheduler and connector show them."""

from __future__ import annotations

import time
from typing import Any

from . import layout
from .exported_request import ExportedRequest
from .writer import NEVER, Writer


class TransferStages:
    """Follows where the transfers of requests stand, for an engine with a connector."""

    def __init__(self, scheduler: Any, writer: Writer) -> None:
        """Count fetches in the file of a writer."""
        self._scheduler = scheduler
        self._writer = writer
        self._fetching: list[ExportedRequest] = []

    @staticmethod
    def leg(request: Any) -> int:
        """Return the part of a request that this engine serves."""
        params = request.kv_transfer_params
        if not params:
            return layout.SERVE
        if params.get("do_remote_decode"):
            return layout.PREFILL
        # vLLM resets `do_remote_prefill` when the fetch begins
        is_decode = params.get("do_remote_prefill") or params.get("remote_request_id")
        return layout.DECODE if is_decode else layout.SERVE

    def update(
        self, running: list[ExportedRequest], holding: list[ExportedRequest], waiting: list[ExportedRequest]
    ) -> None:
        """Note where the fetches of waiting requests stand."""
        scheduler = self._scheduler
        for entry in running:
            entry.stage = layout.NO_TRANSFER
        for entry in waiting:
            params = entry.request.kv_transfer_params
            entry.stage = layout.TO_FETCH if params and params.get("do_remote_prefill") else layout.NO_TRANSFER
        for entry in holding:
            name = entry.request.request_id
            if entry.request.status.name != "WAITING_FOR_REMOTE_KVS":
                entry.stage = layout.NO_TRANSFER
            elif name in scheduler.finished_recving_kv_req_ids:
                has_failed = name in scheduler.failed_recving_kv_req_ids
                entry.stage = layout.FETCH_FAILED if has_failed else layout.FETCHED
            else:
                if entry.stage != layout.FETCHING:
                    self._note_fetch(entry)
                entry.stage = layout.FETCHING

    def _note_fetch(self, entry: ExportedRequest) -> None:
        """Note the start of a fetch."""
        entry.fetch_started_s, entry.fetch_ended_s = time.monotonic(), NEVER
        entry.hit_tokens = int(getattr(entry.request.prefill_stats, "num_local_cached_tokens", 0))
        self._fetching.append(entry)

    def note_fetched(self, results: Any, now_s: float) -> None:
        """Note the ends of fetches, if there are any; how long they took is what the connector has measured."""
        if not self._fetching:
            return
        ready = self._scheduler.finished_recving_kv_req_ids
        stats = getattr(getattr(results, "kv_connector_output", None), "kv_connector_stats", None)
        seconds = (getattr(stats, "data", None) or {}).get("transfer_duration") or ()
        for entry in [one for one in self._fetching if one.request.request_id in ready]:
            self._fetching.remove(entry)
            entry.fetch_ended_s = now_s
            if entry.request.request_id in self._scheduler.failed_recving_kv_req_ids:
                entry.fetch_started_s = NEVER
                continue
            if seconds:
                entry.fetch_ended_s = min(now_s, entry.fetch_started_s + sum(seconds) / len(seconds))
            self._writer.state["num_fetched"] += 1
        self._fetching = [one for one in self._fetching if not one.request.is_finished()]
