"""Commands that pages mark with <!-- run --> do run, in the order of the page, in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import IDS, PAGES, ROOT, blocks_of
from tests.ports import free_port
from tests.services.waiting import PATIENT_SERVERS, wait_until

RUNNABLE = [(page, name) for page, name in zip(PAGES, IDS, strict=True) if any(one.run for one in blocks_of(page))]
PATIENCE_S = 300.0  # a busy machine; usually a few seconds
README = "README.md"
BASH = shutil.which("bash") or "/bin/bash"
ADDRESS = re.compile(r"\b(localhost|127\.0\.0\.1):8000\b")

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like a checkout after `make setup`: the examples, and the command in .venv/bin."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    command = scripts / "block"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m services.cli "$@"\n')
    command.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    """Ours, with the command first on the path."""
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **PATIENT_SERVERS, "PATH": path, "PYTHONPATH": str(ROOT)}


@contextmanager
def server(text: str, folder: Path, port: int) -> Iterator[None]:
    """Run a command that keeps running, from when it is ready; Ctrl-C ends it."""
    script = f"exec {text.strip()} --port {port}"
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [BASH, "-c", script], cwd=folder, env=environment(folder), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_until_ready(process, port, log)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    assert status == 0, log.read_text()[-2000:]


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Ask /ready until it answers 200."""

    def last_lines() -> str:
        return log.read_text()[-2000:]

    def is_ready() -> bool:
        assert process.poll() is None, last_lines()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    wait_until(is_ready, PATIENCE_S, last_lines)


def run(text: str, folder: Path) -> None:
    """Run a block as bash would, and stop at the first failure; HTTP statuses that it prints are 200."""
    done = subprocess.run(
        [BASH, "-euo", "pipefail", "-c", text], cwd=folder, env=environment(folder), timeout=PATIENCE_S,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.strip(), f"{text}\nprints nothing"
    assert set(re.findall(r"^HTTP/1\.1 (\d+)", done.stdout, re.MULTILINE)) <= {"200"}, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("page", "name"),
    [pytest.param(page, name, id=name, marks=[] if name == README else pytest.mark.slow) for page, name in RUNNABLE],
)
def test_a_page_runs(page: Path, name: str, folder: Path) -> None:
    """Its marked blocks succeed; what needs a server finds the one that the page started."""
    blocks = [one for one in blocks_of(page) if one.run]
    servers = [place for place, one in enumerate(blocks) if one.run == "server"]
    assert len(servers) <= 1, f"{name}: starts two servers"
    first = servers[0] if servers else len(blocks)
    for one in blocks[:first]:
        run(one.text, folder)
    if servers:
        port = free_port()
        with server(blocks[first].text, folder, port):
            for one in blocks[first + 1 :]:
                run(ADDRESS.sub(rf"\1:{port}", one.text), folder)
            require_documented(port)


def require_documented(port: int) -> None:
    """Every metric of a running gateway is in the reference."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        families = re.findall(r"^# TYPE (block_\w+)", reply.read().decode(), re.MULTILINE)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert families
    unknown = [family for family in families if not family.endswith("_created") and f"`{family}`" not in page]
    assert not unknown


def test_enough_is_run() -> None:
    """The fast commands of the manual are run somewhere, and the README's cluster is."""
    texts = "\n".join(one.text for page, _ in RUNNABLE for one in blocks_of(page) if one.run)
    for command in (
        "forecast", "replay", "simulate", "policies", "profile show", "tagger predict", "up", "bench", "observe", "accuracy",
    ):  # fmt: skip
        assert f"block {command}" in texts
    assert any(one.run == "server" for one in blocks_of(ROOT / README))
