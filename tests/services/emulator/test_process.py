"""`block serve engine` as a process: start, shutdown, death and restart."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from services.engine_state.reader import Reader
from services.engine_state.view import ENDED, UnreadableError
from tests.services.cli import running as cli
from tests.services.emulator.running import PATIENCE_S, process

LONG = {"prompt": "tell me a story", "max_tokens": 60, "ignore_eos": True, "stream": True}
SMALL = ("-p", "llama-2-7b-a30", "--max-model-len", "512", "--num-gpu-blocks", "64")


def test_a_killed_engine_is_restarted(tmp_path: Path) -> None:
    """A reader notices the death, by signal or by fault, and reads the engine that replaces it."""
    path = str(tmp_path / "engine.state")
    arguments = (*SMALL, "--state-file", path, "--speed", "0.1")
    reader = Reader(path, patience_s=PATIENCE_S)
    with process(*arguments) as started, httpx.Client(base_url=started.url, timeout=PATIENCE_S) as client:
        life = reader.read().life
        assert reader.read().settings["engine"]["max_model_len"] == 512
        with client.stream("POST", "/v1/completions", json=LONG) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            assert len(reader.read().running) == 1
            started.process.kill()
            started.process.wait()
            with pytest.raises(httpx.RemoteProtocolError):
                list(chunks)
        with pytest.raises(UnreadableError) as caught:
            reader.read()
        assert caught.value.reason == ENDED
    with process(*arguments) as started:
        assert reader.read().life != life
        assert len(reader.read().slots) == 0
        with suppress(httpx.HTTPError):  # it may die before its reply is sent
            httpx.post(f"{started.url}/admin/fault", json={"crash": True}, timeout=PATIENCE_S)
        assert started.process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_terminated_engine_finishes_its_requests(tmp_path: Path) -> None:
    """After SIGTERM streams run to their ends, new connections are refused, and the state file is removed."""
    path = tmp_path / "engine.state"
    with process(*SMALL, "--state-file", str(path)) as started:
        with httpx.Client(base_url=started.url, timeout=PATIENCE_S) as client:
            with client.stream("POST", "/v1/completions", json=LONG) as stream:
                chunks = stream.iter_lines()
                next(chunks)
                started.process.send_signal(signal.SIGTERM)
                rest = [line for line in chunks if line]
            assert (len(rest), rest[-1]) == (60, "data: [DONE]")
        assert started.process.wait(PATIENCE_S) == 0
    assert not path.exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{started.url}/health", timeout=PATIENCE_S)


def test_a_port_in_use_is_named() -> None:
    """The command exits at once, with one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port: {port} on 127.0.0.1 is in use" in cli.refusal("serve", "engine", "--port", port)


def test_settings_come_from_flags_the_environment_and_a_file(tmp_path: Path) -> None:
    """A table [engine] sets any flag by its name; the environment has precedence over it, and flags over both."""
    file, state = tmp_path / "good.toml", tmp_path / "engine.state"
    file.write_text(
        '[engine]\nprofile = "llama-2-7b-a30"\nmax_num_seqs = 5\nspeed = 2.0\nexport_contents = false\n'
        "num-gpu-blocks-override = 70\nmax-model-len = 300\nseed = 7\n[gateway]\nport = 1\n"
    )
    environment = {"BLOCK_ENGINE_SPEED": "3", "BLOCK_MAX_MODEL_LEN": "400", "BLOCK_ENGINE_CONFIG": str(file)}
    with process("--state-file", str(state), "--max-model-len", "500", environment=environment) as started:
        assert httpx.get(f"{started.url}/health", timeout=PATIENCE_S).status_code == 200
        view = Reader(str(state), patience_s=PATIENCE_S).read(contents=True)
    assert (view.settings["profile"], view.clock_rate, view.contents) == ("llama-2-7b-a30", 3.0, None)
    told = view.settings["engine"]
    assert (told["max_num_seqs"], told["num_gpu_blocks"], told["max_model_len"]) == (5, 70, 500)


BAD_FILES = (
    ("[engine]\nspeeed = 2\n", "engine.speeed: is no known setting; did you mean speed?"),
    ("[engine]\nprofile_name = 'x'\n", "engine.profile_name: is no known setting"),
    ("[engine]\nconfig = 'x'\n", "engine.config: is no known setting"),
    ("[engine]\nno_export_contents = true\n", "engine.no_export_contents: is no known setting; did you mean export_"),
    (
        "[engine]\nnum_gpu_blocks = 70\nnum-gpu-blocks-override = 80\n",
        "num-gpu-blocks-override: is a duplicate of the same setting",
    ),
    ("[engine]\nspeed = {a = 1}\n", "engine.speed: must be a text, a number"),
    ("[engine]\nspeed = 'fast'\n", "'fast' is not a valid float"),
    ("[engin]\nspeed = 2\n", "engin: is no known table; did you mean engine?"),
    ("speed = 2\n", "speed: is no known table"),
    ("engine = 2\n", "engine: must be a table"),
    ("[engine\n", "is not TOML"),
)


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """An unknown key is refused by name, with the most similar one."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert message in cli.refusal("serve", "engine", "--config", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speed", "0"), "speed: must be above 0"),
        (("--noise", "7"), "noise: must lie between 0 and 1"),
        (("--output-median", "0"), "output_median: must lie between 1"),
        (("--state-file", "/dev/null"), "state file: /dev/null exists"),
        (("--state-file", "/proc/nowhere/x.state"), "state_file: /proc/nowhere/x.state: No such file"),
        (("--max-num-queued-reqs", "0"), "max_num_queued_reqs: must be at least 1"),
    ],
)
def test_bad_settings_are_refused(arguments: tuple[str, ...], message: str) -> None:
    """A bad setting is refused by name before anything is served."""
    assert message in cli.refusal("serve", "engine", "--port", "0", *SMALL, *arguments)


def test_the_log_is_lines_of_json(tmp_path: Path) -> None:
    """The log contains the port on which the engine serves."""
    with process(*SMALL, "--state-file", str(tmp_path / "engine.state")) as started:
        started.process.send_signal(signal.SIGTERM)
        assert started.process.stderr is not None
        (stopped,) = [json.loads(line) for line in started.process.stderr]
    assert (stopped["event"], stopped["server"]) == ("stopped", "engine")
