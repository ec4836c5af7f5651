"""The commands of the page about the endpoint picker run, with other ports and a folder of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.envoy import ENVOY
from tests.docs.pages import FENCE, ROOT
from tests.docs.test_runnable_commands import BASH, PATIENCE_S, environment
from tests.ports import free_port
from tests.services.waiting import wait_until

PAGE = ROOT / "docs" / "picker.md"
MARK = "<!-- run with envoy -->\n"
PORTS = (8001, 8002, 8003, 50052, 9002, 8080, 19000)

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


def test_a_request_goes_through_envoy(tmp_path: Path) -> None:
    """From nothing to a reply with the picker's headers."""
    pytest.importorskip("cryptography", reason="needs the package of the extra 'picker'")
    if not ENVOY.exists():
        pytest.skip(f"needs Envoy in {ENVOY.parents[1]}: make envoy")
    text = PAGE.read_text(encoding="utf-8")
    start, ask = (fence[4] for fence in FENCE.finditer(text) if text[: fence.start()].endswith(MARK))
    configuration = (ROOT / "deploy" / "envoy" / "override_host.yaml").read_text(encoding="utf-8")
    for port in PORTS:
        now = str(free_port())
        assert re.search(rf"\b{port}\b", start + ask + configuration)
        start, ask, configuration = (re.sub(rf"\b{port}\b", now, one) for one in (start, ask, configuration))
    (tmp_path / "envoy.yaml").write_text(configuration, encoding="utf-8")
    start = start.replace("/dev/shm/block", str(tmp_path)).replace(".venv-envoy/bin/envoy", str(ENVOY))  # noqa: S108
    start = start.replace("deploy/envoy/override_host.yaml", str(tmp_path / "envoy.yaml"))
    start = start.replace(" -c ", " --use-dynamic-base-id -c ")
    log = tmp_path / "log"
    replies: list[str] = []

    def is_answered() -> bool:
        asked = subprocess.run([BASH, "-c", ask], capture_output=True, text=True, check=False, cwd=tmp_path)
        replies.append(asked.stdout)
        return "200 OK" in asked.stdout and "x-block-instance" in asked.stdout

    with log.open("w") as output:
        process = subprocess.Popen(
            [BASH, "-c", f"trap 'kill $(jobs -p); wait' TERM\n{start}\nwait"], cwd=tmp_path, stdout=output,
            stderr=output, env=environment(folder_with_block(tmp_path)),
        )  # fmt: skip
        try:
            wait_until(is_answered, PATIENCE_S, lambda: f"{replies[-1]}\n{log.read_text()[-3000:]}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def folder_with_block(folder: Path) -> Path:
    """Return a folder with the command in .venv/bin."""
    scripts = folder / ".venv" / "bin"
    scripts.mkdir(parents=True)
    command = scripts / "block"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m services.cli "$@"\n')
    command.chmod(0o755)
    return folder
