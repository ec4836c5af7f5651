"""Starts and stops a placement driver with all that it needs: instances, lengths, reports, a recorder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from prometheus_client import CollectorRegistry

from services.instances.registered_instances import RegisteredInstances
from services.instances.sources import InstanceSource, watch
from services.objectives import ObjectiveTable, following
from services.placement.decision_recorder import DecisionRecorder
from services.placement.driver import PlacementDriver
from services.placement.forecast_calibration import ForecastCalibration
from services.placement.instance_registry import InstanceRegistry
from services.placement.length_resolution import LengthResolver
from services.placement.listeners import PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.placement.provisioner_reports import ProvisionerReports
from services.placement.settings import SchedulerSettings
from services.security.own_key import own_key
from services.supervised_task import supervised

MEBIBYTE = 2**20


@asynccontextmanager
async def placement_driver(
    settings: SchedulerSettings, source: InstanceSource, registry: CollectorRegistry, poll_s: float = 1.0
) -> AsyncIterator[PlacementDriver]:
    """Follow the instances while the block runs; a bad list is refused at the start, except where it may come later."""
    metrics, objectives = SchedulerMetrics(registry), ObjectiveTable(settings.objectives, also=source.objectives)
    instances, lengths = InstanceRegistry(settings, metrics), LengthResolver(settings, metrics)
    reports = ProvisionerReports(settings.provisioners, settings.scheduler_id, own_key(settings.part_key_file))
    registered = RegisteredInstances(source, settings.registered_file, changed=instances.update)
    watching = counting = listing = recorder = driver = None
    try:
        recorder = _recorder(settings, metrics)
        try:
            instances.update(await registered.poll() or ())
        except ValueError:
            if not source.may_come_later:
                raise

        def pace_of(instance_id: str) -> float | None:
            status = instances.directory.by_id.get(instance_id)
            return None if status is None else status.pace

        listeners: list[PlacementListener] = [ForecastCalibration(metrics, pace_of), lengths, reports]
        if recorder is not None:
            listeners.append(recorder)
        watch_list = partial(watch, registered, poll_s, instances.update)
        watching = asyncio.create_task(supervised("instance list", watch_list))
        async with following(objectives, poll_s):
            driver = PlacementDriver(
                settings, instances, lengths, metrics, listeners, objectives=objectives, registered=registered
            )
            count = partial(reports.follow_waiting, driver.core.waiting_targets)
            counting = asyncio.create_task(supervised("reports of waiting requests", count))
            listing = asyncio.create_task(supervised("models of engines", driver.models.follow))
            with instances.drains_followed(driver.requests.follow):
                yield driver
    finally:
        if driver is not None:
            await driver.tail.close()
            await driver.requests.close()
            driver.models.close()
        for task in (watching, counting, listing):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await registered.close()
        await instances.close()
        await lengths.close()
        await reports.close()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)


def _recorder(settings: SchedulerSettings, metrics: SchedulerMetrics) -> DecisionRecorder | None:
    """Start to record, if settings ask for it."""
    if not settings.record:
        return None
    max_bytes = round(settings.record_mib * MEBIBYTE)
    return DecisionRecorder(settings.record, share=settings.record_share, max_bytes=max_bytes, metrics=metrics)
