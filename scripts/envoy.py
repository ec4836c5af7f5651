"""Envoy with one of the shipped configurations, in which ports and texts are set."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.bench_requests import PLACE
from scripts.processes import Running, started

ROOT = Path(__file__).parents[1]
ENVOY = Path(os.environ.get("BLOCK_ENVOY", ROOT / ".venv-envoy" / "bin" / "envoy"))
CONFIGURATIONS = ROOT / "deploy" / "envoy"
LISTENER, ADMIN, PICKER, ENGINES = 8080, 19000, 9002, (8001, 8002, 8003)  # ports in the configurations
TLS = re.compile(r"    transport_socket: #.*\n(?:      .*\n)+")
ENGINE = "        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}\n"
START_S = 20.0


def configured(
    name: str,
    *,
    port: int,
    admin: int,
    picker: int,
    engines: Sequence[int],
    tls: bool = False,
    changes: Mapping[str, str] | None = None,
) -> str:
    """Return a configuration with other ports, without TLS to the picker unless asked for, and with other changes."""
    text = (CONFIGURATIONS / f"{name}.yaml").read_text(encoding="utf-8")
    listed = "".join(map(ENGINE.format, ENGINES))
    if listed in text:
        text = text.replace(listed, "".join(map(ENGINE.format, engines)))
    for shipped, own in ((LISTENER, port), (ADMIN, admin), (PICKER, picker)):
        text = _replaced(text, f"port_value: {shipped}}}", f"port_value: {own} }}")
    if not tls:
        text, num = TLS.subn("", text)
        if num != 1:
            raise ValueError(f"{name}: has no TLS to the picker")
    for before, now in (changes or {}).items():
        text = _replaced(text, before, now)
    return text


def _replaced(text: str, before: str, now: str) -> str:
    if before not in text:
        raise ValueError(f"the configuration does not contain {before!r}")
    return text.replace(before, now)


@contextmanager
def envoy_running(
    name: str, *, picker: int, engines: Sequence[int], changes: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run Envoy on one core until the block of code ends."""
    if not ENVOY.exists():
        raise RuntimeError(f"{ENVOY} does not exist; make envoy installs it, or BLOCK_ENVOY names another one")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        port, admin = free_ports(2)
        file = folder / "envoy.yaml"
        text = configured(name, port=port, admin=admin, picker=picker, engines=engines, changes=changes)
        file.write_text(text, encoding="utf-8")
        log = stack.enter_context((folder / "log").open("w"))
        command = [str(ENVOY), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id"]
        process = stack.enter_context(started([*command, "--log-level", "error"], stderr=log))
        deadline_s = time.monotonic() + START_S
        while not _is_live(admin):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"Envoy did not start: {(folder / 'log').read_text()[-300:]}")
            time.sleep(0.05)
        yield Running(process=process, port=port)


def _is_live(admin: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{PLACE}:{admin}/ready", timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_ports(num: int) -> list[int]:
    """Return ports that nothing listens on at the moment."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind((PLACE, 0))
        return [probe.getsockname()[1] for probe in probes]
