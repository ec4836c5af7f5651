"""`block up` as a process: from a settings file to Ctrl-C, and its errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.services.cli.running import refusal
from tests.services.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.xdist_group("cluster")  # one at a time: each starts a dozen processes

BLOCK = str(Path(sys.executable).with_name("block"))
SMALL = """
[cluster]
instances = 1
port = 0
[engine]
profile = "llama-2-7b-a30"
served_model_name = "from-the-file"
speed = 4.0
[predictor]
stall_s = 20.0
[tagger]
constant_tokens = 99.0
[scheduler]
sidecar_deadline_ms = 20000
[gateway]
schedule_s = 60.0
[bench]
[provisioner]
"""
ASKING = {"model": "from-the-file", "prompt": "tell me a story", "max_tokens": 200, "ignore_eos": True, "stream": True}


@contextmanager
def up(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command while the block runs; its output is on standard error."""
    with subprocess.Popen([BLOCK, "up", *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Read the output of a command up to a line that contains a text."""
    assert process.stderr is not None
    output = []
    for line in process.stderr:
        output.append(line)
        if text in line:
            return line
    raise AssertionError("".join(output))


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """List the child processes of a command."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def expect_gone(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    assert pids
    wait_until(lambda: not any(is_there(pid) for pid in pids), what="the processes are still there")


def test_a_cluster_from_a_file_serves_until_ctrl_c(tmp_path: Path) -> None:
    """Each process reads its own table; Ctrl-C lets requests in progress finish, and leaves no process."""
    file, objectives = tmp_path / "cluster.toml", tmp_path / "objectives.toml"
    objectives.write_text("[[objective]]\nname = 'chat'\nttft_slo_s = 60\n")
    file.write_text(SMALL.replace("port = 0", f"port = 0\nobjectives = '{objectives}'"))
    with up("-c", str(file)) as process:
        url = line_with(process, "block: http://").split()[1]
        children = children_of(process)
        assert len(children) == 4  # an engine, its sidecar, the tagger, and a gateway that decides by itself
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert [model["id"] for model in client.get("/models").json()["data"]] == ["from-the-file"]
            unknown = client.post("/completions", json=ASKING, headers={"x-block-objective": "chatt"})
            assert (unknown.status_code, "did you mean chat?" in unknown.text) == (400, True)
            named = {"x-block-objective": "chat"}
            with client.stream("POST", "/completions", json=ASKING, headers=named) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                os.kill(process.pid, signal.SIGINT)
                line_with(process, "draining")
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert response.headers["x-block-instance"] == "engine-0"
        line_with(process, "stopped part=engine-0")
        assert process.wait(PATIENCE_S) == 0
        expect_gone(children)


def test_parts_end_with_the_command_however_it_ends() -> None:
    """Its processes exit even when it is killed."""
    with up("-n", "2", "--port", "0") as process:
        line_with(process, "serving part=engine")
        children = children_of(process)
        assert len(children) >= 2
        process.kill()
        expect_gone(children)


def test_a_port_in_use_is_one_line() -> None:
    """A port in use is reported before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refusal("up", "--port", port) == f"block: port: {port} on 127.0.0.1 is in use\n"


def test_a_bad_table_of_objectives(tmp_path: Path) -> None:
    """It is refused before anything is started."""
    file = tmp_path / "objectives.toml"
    file.write_text("[[objective]]\nname = 'chat'\nweigth = 1\n")
    expected = f"block: {file}: objective[0].weigth: is no known field; did you mean weight?\n"
    assert refusal("up", "--objectives", str(file), "--port", "0") == expected


BAD_FILES = (
    ("[cluster]\ninstancs = 2\n", "instancs: is no known setting of [cluster]; did you mean instances?"),
    ("[clustr]\n", "clustr: is no known table; did you mean cluster?"),
    ("cluster = 2\n", "cluster: must be a table"),
    ("[cluster]\ninstances = 0\n", "instances: must be a whole number from 1 to 256, not 0"),
    ("[cluster]\ninstances = true\n", "instances: must be a whole number"),
    ("[cluster]\nport = 'x'\n", "port: must lie between 0 and 65535, not 'x'"),
    ("[cluster]\nhost = 7\n", "host: must be a text, not 7"),
    ("[cluster]\nobjectives = 7\n", "objectives: must be a text, not 7"),
    ("[cluster]\npolicies = []\n", "policies: name at least one"),
    ("[cluster]\npolicies = ['blok']\n", "did you mean block?"),
    ("[cluster]\npolicies = 3\n", "policies: must be a list of texts, not 3"),
    ("[cluster\n", "is not TOML"),
)


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_bad_file(text: str, message: str, tmp_path: Path) -> None:
    """The error is one line that names the key, and nothing is started."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    output = refusal("up", "--config", str(file))
    assert message in output
    assert str(file) in output


def test_a_bad_table_of_a_part(tmp_path: Path) -> None:
    """The error of the process that reads the table is reported as one line, and the others are stopped."""
    file = tmp_path / "bad.toml"
    file.write_text("[engine]\nspeeed = 2\n")
    done = subprocess.run(
        [BLOCK, "up", "-n", "1", "--port", "0", "--log-level", "warning", "-c", str(file)],
        capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"block: engine-0 did not start: {file}: engine.speeed: is no known setting; did you mean speed?\n"
    )
