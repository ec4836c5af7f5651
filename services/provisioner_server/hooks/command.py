"""`exec`: any command. It gets the action as JSON on standard input, and may answer with a HookReply on its output.

The same action may come again after a crash: the command must know it by its `action_id`, also in BLOCK_ACTION_ID.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

from google.protobuf.json_format import Parse, ParseError

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import HookError, require_done
from services.provisioner_server.journal import as_plain

MOST_BYTES = 1 << 20


class Command:
    """Runs a command, without a shell, for every action."""

    def __init__(self, words: list[str], timeout_s: float = 60.0) -> None:
        """Know what to run."""
        if not words:
            raise ValueError("exec: is empty")
        self._words, self._timeout_s = words, timeout_s

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Run it; what it says on its error output is the reason of a failure."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, "BLOCK_ACTION_ID": action.action_id},
            )  # fmt: skip
        except OSError as error:
            raise HookError(f"{self._words[0]}: {error.strerror}") from None
        try:
            said, complaint = await asyncio.wait_for(
                process.communicate(json.dumps(as_plain(action)).encode()), self._timeout_s
            )
        except TimeoutError:
            raise HookError(f"{self._words[0]}: took longer than {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()
        if process.returncode:
            words = complaint.decode(errors="replace").strip().splitlines()
            raise HookError(f"{self._words[0]}: status {process.returncode}: {words[-1] if words else 'said nothing'}")
        return require_done(reply_from(said, self._words[0]), action)

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Know only what was answered."""
        return None

    def leavers(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Leave the choice free."""
        del instance_ids, num
        return None

    async def close(self) -> None:
        """Hold nothing."""


def reply_from(said: bytes, who: str) -> pb.HookReply:
    """Read an answer; an empty one means that all was done."""
    if len(said) > MOST_BYTES:
        raise HookError(f"{who}: said more than {MOST_BYTES} bytes")
    if not said.strip():
        return pb.HookReply()
    try:
        return Parse(said, pb.HookReply(), ignore_unknown_fields=True)
    except (ParseError, UnicodeDecodeError, ValueError) as error:
        raise HookError(f"{who}: its answer is no HookReply: {error}") from None
