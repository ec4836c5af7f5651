"""The side channel between emulated engines: one asks another for the KV blocks of a finished prefill.

It takes the place of NIXL's handshake, notifications and transfers. A decoding engine (D) watches the blocks that a
request names from its arrival until they are fetched (`POST /kv/watch`, a reply that stays open while the prefilling
engine (P) holds the blocks), extends their lease meanwhile (`POST /kv/heartbeat`), and then lets P free them
(`POST /kv/done`). All bodies are JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from predictor.config import EngineConfig
from services.emulator.transfer_params import RemoteBlocks
from services.http.application import JSON, Application, Call, while_client_stays
from services.http.client import HttpClient
from services.http.connection import Connection
from services.http.errors import ApiError
from services.http.headers import request_head
from services.http.origin import Origin

CONNECTOR_VERSION = 14  # of vLLM 0.32's NIXL connector
TRANSFER_MODE = "pull"
REPLY_S = 5.0  # to confirm that blocks are held, and to take a notification
SILENCE_S = 3600.0  # between two looks at a watch that says nothing
MAX_BODY_BYTES = 1 << 20
HELD = b"held\n"  # the only line of a watch while the blocks are held


class TransferError(Exception):
    """KV blocks cannot be fetched; the message says why."""


def compatibility_hash(model: str, version: str, config: EngineConfig) -> str:
    """Hash what two engines must agree on to exchange KV blocks: as NIXL's hash, and the size of the blocks."""
    factors = {
        "version": version,
        "connector_version": CONNECTOR_VERSION,
        "transfer_mode": TRANSFER_MODE,
        "model": model,
        "block_size": config.block_size,
        "kv_bytes_per_token": config.kv_bytes_per_token,
    }
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOfPrefill:
    """What the side channel can do with the blocks that an engine holds, by the ids of their requests.

    `ending` returns an event that is set when the blocks are no longer held, None where they are not.
    """

    engine_id: str
    compatibility: str
    ending: Callable[[str], asyncio.Event | None]
    extend: Callable[[str], None]
    release: Callable[[str], None]


class SideChannel(Application):
    """Serves the blocks that one engine holds."""

    name = "side channel"

    def __init__(self, held: BlocksOfPrefill) -> None:
        """Serve these blocks."""
        super().__init__()
        self._held = held
        self.routes = {
            "/kv/watch": {"POST": self._watch},
            "/kv/heartbeat": {"POST": self._heartbeat},
            "/kv/done": {"POST": self._done},
        }

    async def _watch(self, call: Call) -> None:
        """Confirm that blocks are held, and end the reply when they are no longer."""
        data = await self._json(call)
        if data.get("compatibility_hash") != self._held.compatibility:
            raise ApiError(409, "compatibility_hash: version, model and block size of the two engines differ")
        (request_id,) = self._ids(data, num=1)
        ending = self._held.ending(request_id)
        if ending is None:
            raise ApiError(404, f"request_ids: the blocks of {request_id} are not held, or not any more")
        with self.admitted():
            await call.start(200, [])
            await call.write(HELD)
            await while_client_stays(_end_after(ending, call), call.receive)

    async def _heartbeat(self, call: Call) -> None:
        for request_id in self._ids(await self._json(call)):
            self._held.extend(request_id)
        await call.reply(200, JSON, b"{}")

    async def _done(self, call: Call) -> None:
        for request_id in self._ids(await self._json(call)):
            self._held.release(request_id)
        await call.reply(200, JSON, b"{}")

    async def _json(self, call: Call) -> dict[str, Any]:
        try:
            data = json.loads(await self.body_of(call, MAX_BODY_BYTES))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object")
        if data.get("engine_id") != self._held.engine_id:
            raise ApiError(404, f"engine_id: this is {self._held.engine_id}, not {data.get('engine_id')!r}")
        return data

    @staticmethod
    def _ids(data: dict[str, Any], num: int | None = None) -> list[str]:
        ids = data.get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids) or num not in (None, len(ids)):
            raise ApiError(400, f"request_ids: must be {'one id' if num == 1 else 'ids'} in a list, not {ids!r}")
        return ids


async def _end_after(ending: asyncio.Event, call: Call) -> None:
    await ending.wait()
    await call.end()


class Watch:
    """An open reply of another engine: it holds the blocks until the reply ends."""

    def __init__(self, connection: Connection) -> None:
        """Watch by a reply whose first line has been read."""
        self._connection = connection

    async def lost(self) -> None:
        """Return when the other engine does not hold the blocks any more, or has ended."""
        while True:
            try:
                if not await self._connection.read(SILENCE_S):
                    return
            except TimeoutError:
                continue  # nothing is sent while the blocks are held
            except ConnectionError:
                return

    def close(self) -> None:
        """End the watch."""
        self._connection.abort()


class SideChannelClient:
    """Asks the side channels of other engines; every call has a deadline."""

    def __init__(self, compatibility: str) -> None:
        """Connect to no engine yet."""
        self._compatibility = compatibility
        self._client = HttpClient(connect_s=REPLY_S)

    async def watch(self, remote: RemoteBlocks) -> Watch:
        """Return once the other engine has confirmed that it holds the blocks; TransferError where it does not."""
        fields = {"compatibility_hash": self._compatibility}
        try:
            async with asyncio.timeout(REPLY_S):
                connection = await self._send(b"/kv/watch", remote, [remote.request_id], **fields)
                try:
                    if connection.status == 200 and await connection.read(REPLY_S) == HELD:
                        return Watch(connection)
                    reply = await connection.read_all(REPLY_S, MAX_BODY_BYTES)
                except BaseException:
                    connection.abort()
                    raise
        except (ConnectionError, TimeoutError) as error:
            raise TransferError(str(error) or f"{remote.host}:{remote.port} did not answer in time") from None
        connection.release()
        raise TransferError(reply.decode(errors="replace"))

    async def heartbeat(self, remote: RemoteBlocks, request_ids: Collection[str]) -> None:
        """Extend the leases of blocks on the engine that holds `remote`."""
        await self._notify(b"/kv/heartbeat", remote, list(request_ids))

    async def done(self, remote: RemoteBlocks) -> None:
        """Let the other engine free the blocks."""
        await self._notify(b"/kv/done", remote, [remote.request_id])

    def close(self) -> None:
        """Close the idle connections."""
        self._client.close()

    async def _notify(self, path: bytes, remote: RemoteBlocks, request_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(REPLY_S):
                connection = await self._send(path, remote, request_ids)
                try:
                    reply = await connection.read_all(REPLY_S, MAX_BODY_BYTES)
                finally:
                    connection.release()
        except (ConnectionError, TimeoutError) as error:
            raise TransferError(str(error) or f"{remote.host}:{remote.port} did not answer in time") from None
        if connection.status != 200:
            raise TransferError(reply.decode(errors="replace"))

    async def _send(self, path: bytes, remote: RemoteBlocks, request_ids: Sequence[str], **fields: str) -> Connection:
        body = json.dumps({"engine_id": remote.engine_id, "request_ids": request_ids, **fields}).encode()
        origin = Origin(scheme="http", host=remote.host, port=remote.port)
        return await self._client.send(origin, request_head(b"POST", origin, path, JSON, len(body)), body, REPLY_S)
