"""Certificates of HTTP servers that change while streams run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from services.http.application import Application, Call
from services.http.client import HttpClient
from services.http.connection import ConnectError
from services.http.headers import request_head
from services.http.origin import origin_of
from services.http.server import answering, listening
from services.security import certificates as module
from services.security.certificates import Certificates
from services.security.settings import TlsSettings
from tests.services.security.authorities import Authority, run_on
from tests.services.waiting import until

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
WITHIN_S = 60.0


class Streamer(Application):
    """Streams a number for each time that it is let on."""

    def __init__(self) -> None:
        """Serve one path."""
        super().__init__()
        self.routes = {"/": {"GET": self._stream}}
        self.next = asyncio.Event()

    async def _stream(self, call: Call) -> None:
        await call.start(200, [(b"content-type", b"text/event-stream")])
        for number in range(3):
            await self.next.wait()
            self.next.clear()
            await call.write(b"%d" % number)
        await call.end()


@LOOPS
def test_a_stream_survives_new_certificates_and_a_new_ca(tmp_path: Path, loop: str) -> None:
    """What was connected goes on; handshakes after the change are those of the new files, on both sides."""
    old, new = Authority(folder=tmp_path / "old"), Authority(folder=tmp_path / "new")
    own = Authority(folder=tmp_path / "own", pair=old.pair)
    own.issue("server")
    own.issue("client")
    new.issue("client")
    old.issue("client")

    async def test() -> None:
        app, server = Streamer(), Certificates(own.settings("server"))
        with listening("127.0.0.1", 0) as listener:
            async with answering(app, listener, 1.0, tls=server.server_context):
                origin = origin_of(f"https://localhost:{listener.getsockname()[1]}")
                head = request_head(b"GET", origin, b"/", [], 0)
                client = HttpClient(tls=Certificates(own.settings("client")).http_context)
                stream = await client.send(origin, head, b"", WITHIN_S)
                app.next.set()
                assert await stream.read(WITHIN_S) == b"0"

                own.pair = new.pair
                own.issue("server")
                own.issue("client")
                own.ca_file.write_bytes(new.pair.certificate)

                async def accepted(tls: TlsSettings) -> bool:
                    fresh = HttpClient(tls=Certificates(tls).http_context)
                    try:
                        status, _ = await fresh.get(origin, b"/missing", within_s=WITHIN_S)
                    except ConnectError:
                        return False
                    finally:
                        fresh.close()
                    return status == 404

                await until(lambda: accepted(new.settings("client")))
                assert not await accepted(old.settings("client"))
                status, _ = await client.get(origin, b"/missing", within_s=WITHIN_S)  # the client's files changed, too
                assert status == 404
                for number in (b"1", b"2"):
                    app.next.set()
                    assert await stream.read(WITHIN_S) == number
                assert await stream.read(WITHIN_S) == b""
                client.close()

    run_on(loop, test)


@pytest.fixture
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at for every handshake."""
    monkeypatch.setattr(module, "CHECK_S", 0.0)


@pytest.mark.usefixtures("looked_at_each_time")
def test_a_broken_file_keeps_what_was_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once and counted, and the repaired files are used."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")
    certificates = Certificates(ca.settings("server"))
    before = certificates.loaded
    (tmp_path / "server.key").write_text("half a")
    with caplog.at_level(logging.INFO):
        assert all(certificates.loaded is before for _ in range(3))
        ca.issue("server")
        assert certificates.loaded is not before
    assert certificates.num_failed_reloads == 1
    broken, repaired = (record.getMessage() for record in caplog.records)
    assert broken == "certificates changed, and cannot be used; the old ones stay"
    assert repaired == "certificates are read again"
    assert "PRIVATE" not in caplog.text


@pytest.mark.usefixtures("looked_at_each_time")
def test_a_file_that_is_removed_while_it_is_read_keeps_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake that looks at the files does not fail."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")
    certificates = Certificates(ca.settings("server"))
    before, read = certificates.loaded, module._read

    def read_and_remove(name: str, path: str) -> bytes:
        content = read(name, path)
        if name == "tls_key":
            Path(path).unlink()
        return content

    with monkeypatch.context() as patch:
        patch.setattr(module, "_read", read_and_remove)
        ca.issue("server")
        assert certificates.loaded is before
    ca.issue("server")
    assert certificates.loaded is not before
    assert certificates.num_failed_reloads == 1


@pytest.mark.usefixtures("looked_at_each_time")
def test_a_swapped_link_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted Secret: by another target of a link to a folder."""
    folders = [Authority(folder=tmp_path / name) for name in ("first", "second")]
    for ca in folders:
        ca.issue("tls")
    link = tmp_path / "data"
    link.symlink_to("first")
    certificates = Certificates(TlsSettings(tls_cert=str(link / "tls.crt"), tls_key=str(link / "tls.key")))
    assert certificates.loaded.files["tls_cert"] == (folders[0].folder / "tls.crt").read_bytes()
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").replace(link)
    assert certificates.loaded.files["tls_cert"] == (folders[1].folder / "tls.crt").read_bytes()
