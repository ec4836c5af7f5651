"""The names in a peer's certificate, and the list of those that are allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

KINDS = ("DNS", "URI", "IP Address")
MAX_NAMES_SHOWN = 5


def require_pattern(field: str, pattern: str) -> None:
    """Raise ValueError where a pattern is no name, and no name after `*.`."""
    rest = pattern.removeprefix("*.")
    if not rest or not rest.isascii() or not rest.isprintable() or any(character in rest for character in "*, "):
        raise ValueError(f"{field}: {pattern!r} must be a DNS name, *.NAME or a URI")


def names_in(certificate: Mapping[str, Any] | None) -> list[str]:
    """List the alternative names of a certificate, as `ssl` describes it."""
    return [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind in KINDS]


def is_allowed(names: Iterable[str], patterns: Collection[str]) -> bool:
    """Return whether one of a certificate's names is on the list; an empty list allows all."""
    return not patterns or any(_matches(name, pattern) for name in names for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Compare as TLS does: without case, and `*.` stands for exactly one label. URIs are compared as they are."""
    if "://" in pattern:
        return name == pattern
    name, pattern = name.lower(), pattern.lower()
    if pattern.startswith("*."):
        first, dot, rest = name.partition(".")
        return bool(first and dot) and rest == pattern[2:]
    return name == pattern


def not_allowed(peer: str, names: Collection[str], patterns: Collection[str]) -> str:
    """Say why a peer is refused, and by which setting."""
    shown = ", ".join(list(names)[:MAX_NAMES_SHOWN]) or "no name"
    return f"the {peer}'s certificate is for {shown}, and --tls-peer allows {', '.join(patterns)}"
