"""The instances over HTTP, at the port for operators: listed, registered, removed, drained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote

from scheduler.candidate import CandidateStatus
from services.http.application import JSON, Application, Call, Endpoint
from services.http.errors import ApiError
from services.http.json_body import JsonError, request_json
from services.instances.instance import DRAINING, table_of
from services.instances.registered_instances import NEW, ConflictError, KnownInstance
from services.instances.registrations import DrainOrder, Registration
from services.placement.driver import PlacementDriver
from services.rpc.errors import BusyError, UnknownNameError

PATH = "/instances"
MAX_BODY_BYTES = 64 * 1024
ID_FIELD = "instance_id"
COUNTS = ("num_running", "num_waiting", "num_reserved")


def instance_routes(driver: PlacementDriver, app: Application) -> Mapping[str, Mapping[str, Endpoint]]:
    """Return the endpoints for a port of operators, which checks the callers."""
    return InstancePages(driver, app).routes


class InstancePages:
    """Lists and changes the instances of one placement driver."""

    def __init__(self, driver: PlacementDriver, app: Application) -> None:
        """Serve as a part of an application."""
        self._driver = driver
        self._app = app

    @property
    def routes(self) -> Mapping[str, Mapping[str, Endpoint]]:
        """The endpoints by path and method."""
        return {
            PATH: {"GET": self._list, "POST": self._register},
            f"{PATH}/*": {"GET": self._one, "PUT": self._one, "DELETE": self._one, "POST": self._one},
        }

    async def _list(self, call: Call) -> None:
        instances = [self._described(known) for known in self._driver.registered.known()]
        await _reply(call, 200, {"instances": instances, "scheduler_id": self._driver.settings.scheduler_id})

    async def _register(self, call: Call) -> None:
        query = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        replaces = query.get("replace", ["false"])[-1]
        if replaces not in ("true", "false", ""):
            raise ApiError(400, "replace: must be true or false")
        await self._put(call, await self._read(call), replaces=replaces != "false")

    async def _one(self, call: Call) -> None:
        """Serve /instances/ID and /instances/ID/drain; in an id, / is written as %2F."""
        parts = _raw_path(call).split("/")[2:] or [""]  # none where the / before the id is escaped, too
        instance_id, method = unquote(parts[0]), call.scope["method"]
        if len(parts) == 1 and instance_id:
            if method in ("GET", "HEAD"):
                await self._show(call, instance_id)
            elif method == "PUT":
                await self._replace(call, instance_id)
            elif method == "DELETE":
                await self._remove(call, instance_id)
            else:
                raise self._app.not_allowed(call.scope["path"], method, ["GET", "PUT", "DELETE"])
        elif len(parts) == 2 and parts[1] == "drain" and instance_id:
            if method == "POST":
                await self._drain(call, instance_id)
            elif method == "DELETE":
                await self._undrain(call, instance_id)
            else:
                raise self._app.not_allowed(call.scope["path"], method, ["POST", "DELETE"])
        else:
            raise self._app.not_found(call.scope["path"])

    async def _show(self, call: Call, instance_id: str) -> None:
        await _reply(call, 200, self._described(self._known(instance_id)))

    async def _replace(self, call: Call, instance_id: str) -> None:
        table = await self._read(call)
        if isinstance(table, dict) and table.setdefault(ID_FIELD, instance_id) != instance_id:
            raise ApiError(400, f"{ID_FIELD}: must be that of the path, {instance_id!r}")
        await self._put(call, table, replaces=True)

    async def _put(self, call: Call, table: Any, *, replaces: bool) -> None:
        with _errors_as_replies():
            registration = Registration.from_table(table, time.time())
            result = await self._driver.registered.register(registration, replaces=replaces)
        known = self._known(registration.instance.instance_id)
        await _reply(call, 201 if result == NEW else 200, self._described(known))

    async def _remove(self, call: Call, instance_id: str) -> None:
        with _errors_as_replies():
            await self._driver.registered.remove(instance_id)
        await call.reply(204, [], b"")

    async def _drain(self, call: Call, instance_id: str) -> None:
        with _errors_as_replies():
            order = DrainOrder.from_table(await self._read(call, empty={}), time.time())
            await self._driver.registered.drain(instance_id, order)
        await _reply(call, 202, self._described(self._known(instance_id)))

    async def _undrain(self, call: Call, instance_id: str) -> None:
        with _errors_as_replies():
            await self._driver.registered.undrain(instance_id)
        await call.reply(204, [], b"")

    async def _read(self, call: Call, empty: Any = None) -> Any:
        body = await self._app.body_of(call, MAX_BODY_BYTES)
        if not body.strip() and empty is not None:
            return empty
        try:
            return request_json(body)
        except JsonError as error:
            raise ApiError.of(error) from None
        except ValueError as error:
            raise ApiError(400, f"body: is not JSON: {error}") from None

    def _known(self, instance_id: str) -> KnownInstance:
        known = self._driver.registered.find(instance_id)
        if known is None:
            raise ApiError(404, f"{ID_FIELD}: there is no instance {instance_id!r}")
        return known

    def _described(self, known: KnownInstance) -> dict[str, Any]:
        """Describe an instance: its facts, where it comes from, whether it takes requests, and how many it has."""
        instance, now_s = known.instance, time.time()
        described = {"models": [], "role": "both", "state": "ready", **table_of(instance), "source": known.source}
        handle = self._driver.registry.find(instance.instance_id)
        if handle is not None:
            status = handle.status
            reason = status.unhealthy_candidate(time.monotonic())
            is_down = reason is not None and reason.status is not CandidateStatus.DRAINING
            is_known = status.reported_s > 0
            described["health"] = reason.note if reason is not None and is_down else "ok" if is_known else "unknown"
            if status.is_draining is False and reason is not None and not is_down:
                described["state"] = status.reported_state
            num = sum(status.indicators.get(name, 0.0) for name in COUNTS)  # what is 0 is not reported
            described["requests"] = round(num) if is_known else None
        if instance.state == DRAINING and instance.drain is not None:
            left_s = instance.drain.deadline_unix_s - now_s
            described["drain"] |= {"deadline_in_s": None if left_s == float("inf") else round(left_s, 3)}
        expires_in_s = self._driver.registered.expires_in_s(known)
        if expires_in_s is not None:
            described["expires_in_s"] = round(expires_in_s, 3)
        return described


@contextmanager
def _errors_as_replies() -> Iterator[None]:
    """Raise ApiError for an error that is the caller's, or of the disk."""
    try:
        yield
    except ConflictError as error:
        raise ApiError(409, str(error), kind="invalid_request_error", code="conflict") from None
    except OSError as error:
        raise ApiError(503, f"registered_file: cannot be written: {error.strerror or error}") from None
    except (ValueError, UnknownNameError, BusyError) as error:
        raise ApiError.of(error) from None


async def _reply(call: Call, status: int, body: Mapping[str, Any]) -> None:
    headers = [*JSON, (b"cache-control", b"no-store")]
    await call.reply(status, headers, json.dumps(body, separators=(",", ":")).encode())


def _raw_path(call: Call) -> str:
    """Return the path as it was sent, so that an escaped / is no separator."""
    raw: bytes = call.scope.get("raw_path") or call.scope["path"].encode()
    return raw.decode("latin-1").partition("?")[0]
