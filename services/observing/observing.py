"""Observes for a while, until it is interrupted, or until there is no more room."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from predictor.config import EngineConfig
from predictor.mirror.scraped_metrics import parse_max_model_len, parse_metrics
from predictor.profile import Profile
from services.http.client import HttpClient
from services.http.origin import Origin, origin_of
from services.http.server import answering, listening
from services.observing.state_file import StateFileObservation
from services.observing.traffic import TrafficObservation
from services.predictor_server.proxy import Proxy
from services.predictor_server.settings import MirrorSettings
from simulator.accuracy.window import ObservedWindow

POLL_S = 0.05  # the ring of a state file has 256 steps
SCRAPE_S = 5.0
MAX_METRICS_BYTES = 16 * 2**20

Progress = Callable[[float], None]


def observe_state_file(
    state_file: str, duration_s: float, *, profile: Profile | str = "", instance: str = "", progress: Progress
) -> ObservedWindow:
    """Observe an engine by its state file; an engine that ends, or Ctrl-C, ends the window early."""
    observation = StateFileObservation(state_file)
    start_s = time.monotonic()
    try:
        with suppress(KeyboardInterrupt):
            while (since_s := time.monotonic() - start_s) < duration_s and not observation.is_full:
                time.sleep(min(POLL_S, duration_s - since_s))
                observation.poll()
                progress(min(1.0, since_s / duration_s))
        return observation.window(profile=profile, instance=instance)
    finally:
        observation.close()


async def observe_proxy(  # noqa: PLR0913 - what is observed, and how
    settings: MirrorSettings,
    duration_s: float,
    given: Mapping[str, Any],
    *,
    profile: Profile | None,
    instance: str = "",
    serving: Callable[[int], None],
    progress: Progress,
    clock_rate: float = 1.0,
) -> ObservedWindow:
    """Observe the requests that pass through a proxy before an endpoint.

    `given` are settings of the engine that override those that it reports and those of the profile; `serving` gets the
    proxy's port. `clock_rate` is above 1 for an emulated engine of that speed.
    """
    origin = origin_of(settings.engine_url)
    reported, model = await reported_settings(origin)
    suggested = {} if profile is None else profile.suggested_settings
    config = EngineConfig(**{**suggested, **reported, **given})
    observation = TrafficObservation(clock_rate=clock_rate)
    proxy = Proxy(settings, origin, observation, lambda _path, _status: None)
    start_s = time.monotonic()
    with listening(settings.host, settings.port, "proxy_port") as own:
        port = own.getsockname()[1]
        try:
            async with answering(proxy, own, settings.drain_s):
                serving(port)
                with suppress(asyncio.CancelledError):
                    while (since_s := time.monotonic() - start_s) < duration_s and not observation.is_full:
                        await asyncio.sleep(min(0.25, duration_s - since_s))
                        progress(min(1.0, since_s / duration_s))
                return observation.window(
                    config, profile=profile or "", instance=instance, model=model, source="a proxy"
                )
        finally:
            proxy.close()


async def reported_settings(origin: Origin) -> tuple[dict[str, Any], str]:
    """Return the settings that an engine reports over HTTP, and the name of its model; none where it does not."""
    client, settings, model = HttpClient(), dict[str, Any](), ""
    try:
        with suppress(OSError, TimeoutError, ValueError):
            status, body = await client.get(origin, b"/metrics", within_s=SCRAPE_S, max_bytes=MAX_METRICS_BYTES)
            if status == 200:
                settings |= parse_metrics(body.decode(errors="replace")).settings
        with suppress(OSError, TimeoutError, ValueError, LookupError, TypeError):
            status, body = await client.get(origin, b"/v1/models", within_s=SCRAPE_S)
            if status == 200:
                if (length := parse_max_model_len(body)) is not None:
                    settings["max_model_len"] = length
                model = str(json.loads(body)["data"][0]["id"])
    finally:
        client.close()
    return settings, model
