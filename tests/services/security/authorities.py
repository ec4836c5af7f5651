"""CAs and certificates of tests, on disk."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from services.security.development_ca import KeyPair, make_ca, make_certificate
from services.security.settings import TlsSettings
from tests.services.waiting import LIMIT_S

LOCAL = ("localhost", "127.0.0.1")


@dataclass(slots=True, kw_only=True)
class Authority:
    """A CA with its folder, and the certificates that it signs there."""

    folder: Path
    pair: KeyPair = field(default_factory=make_ca)

    def __post_init__(self) -> None:
        """Write the certificate of the CA."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca_file.write_bytes(self.pair.certificate)

    @property
    def ca_file(self) -> Path:
        """The certificate of the CA."""
        return self.folder / "ca.crt"

    def issue(self, name: str, *names: str, days: float = 1.0, signed_by: KeyPair | None = None) -> bytes:
        """Write NAME.crt and NAME.key for some names, localhost by default; return the certificate as DER."""
        made = make_certificate(signed_by or self.pair, names or (f"{name}.test", *LOCAL), days)
        for suffix, data in (("key", made.key), ("crt", made.certificate)):
            fresh = self.folder / f"{name}.{suffix}.new"
            fresh.write_bytes(data)
            fresh.rename(self.folder / f"{name}.{suffix}")
        return ssl.PEM_cert_to_DER_cert(made.certificate.decode())

    def settings(self, name: str = "", *, peers: Sequence[str] = (), **fields: Any) -> TlsSettings:
        """Return settings with a certificate, if one is named, and with this CA."""
        pair = {"tls_cert": str(self.folder / f"{name}.crt"), "tls_key": str(self.folder / f"{name}.key")}
        return TlsSettings(**{
            **(pair if name else {}), "tls_ca": str(self.ca_file), "tls_peers": tuple(peers), **fields,
        })  # fmt: skip


def run_on(loop: str, test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on asyncio's own event loop, or on that of our servers; a test that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(limited())
