"""`exec`: any command. It receives the action as JSON on standard input, and may write a HookReply to its output.

After a crash the same action may be repeated: the command must recognise its `action_id`, also in BLOCK_ACTION_ID.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import Hook, HookError, require_done
from services.provisioner_server.journal import as_plain
from services.rpc.json_form import message_from

MAX_BYTES = 1 << 20


class Command(Hook):
    """Runs a command, without a shell, for every action."""

    def __init__(self, words: list[str], timeout_s: float = 60.0) -> None:
        """Set the command's words and its time limit."""
        if not words:
            raise ValueError("exec: is empty")
        self._words, self._timeout_s = words, timeout_s

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Run it; the last line of its error output is the reason of a failure."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, "BLOCK_ACTION_ID": action.action_id},
            )  # fmt: skip
        except OSError as error:
            raise HookError(f"{self._words[0]}: {error.strerror}") from None
        try:
            output, error_output = await asyncio.wait_for(
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
            lines = error_output.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "no error output"
            raise HookError(f"{self._words[0]}: status {process.returncode}: {reason}")
        return require_done(reply_from(output, self._words[0]), action)

    async def close(self) -> None:
        """Do nothing."""


def reply_from(output: bytes, source: str) -> pb.HookReply:
    """Parse a reply; an empty one means that the action was carried out."""
    if len(output) > MAX_BYTES:
        raise HookError(f"{source}: its reply is longer than {MAX_BYTES} bytes")
    if not output.strip():
        return pb.HookReply()
    try:
        return message_from(json.loads(output), pb.HookReply())
    except (ValueError, RecursionError) as error:
        raise HookError(f"{source}: its reply is not a HookReply: {error}") from None
