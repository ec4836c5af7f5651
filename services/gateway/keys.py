"""API keys of the gateway's clients: compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from simulator.codec import read_text

BEARER = b"bearer "
LONGEST_KEY = 512


OBJECTIVE = "objective="
OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """The client that a key belongs to, and the objective of its requests that name none."""

    name: str = ""
    objective: str = ""
    is_operator: bool = False


ANY_CLIENT = KeyHolder()  # where no keys are set


class ApiKeys:
    """The accepted keys by digest, each with its holder."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read lines of `[NAME] KEY [objective=OBJECTIVE] [operator]`; a line that starts with # is a comment."""
        self._holders: list[tuple[bytes, KeyHolder]] = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            objective = ""
            is_operator = len(words) > 1 and words[-1] == OPERATOR
            if is_operator:
                words.pop()
            if len(words) > 1 and words[-1].startswith(OBJECTIVE):
                objective = words.pop().removeprefix(OBJECTIVE)
                if not objective:
                    raise ValueError(f"api_keys: line {number} must name an objective after {OBJECTIVE}")
            if len(words) > 2 or len(words[-1]) > LONGEST_KEY:
                raise ValueError(
                    f"api_keys: line {number} must be a key, or a name and a key, and may end in {OBJECTIVE}NAME, "
                    f"and that in {OPERATOR}"
                )
            name = words[0] if len(words) == 2 else f"key-{number}"
            holder = KeyHolder(name=name, objective=objective, is_operator=is_operator)
            self._holders.append((_digest(words[-1].encode()), holder))

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """Read a file; one without keys would refuse every client, and is an error."""
        keys = cls(read_text(path).splitlines())
        if not keys:
            raise ValueError(f"api_key_file: {path} holds no keys")
        return keys

    def __len__(self) -> int:
        """Return the number of keys; without any, every client is admitted."""
        return len(self._holders)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of objectives that keys have."""
        return tuple(dict.fromkeys(holder.objective for _, holder in self._holders if holder.objective))

    def may_operate(self, holder: KeyHolder) -> bool:
        """Return whether a holder may see what all clients do: operators, or everybody where there are none."""
        return holder.is_operator or not any(one.is_operator for _, one in self._holders)

    def holder(self, authorization: bytes | None) -> KeyHolder | None:
        """Return the holder of the key in an Authorization header; None where the key is not known."""
        if authorization is None or authorization[: len(BEARER)].lower() != BEARER:
            return None
        digest = _digest(authorization[len(BEARER) :].strip())
        found = None
        for known, holder in self._holders:  # always all of them: the time must not depend on the match
            if hmac.compare_digest(known, digest):
                found = holder
        return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
