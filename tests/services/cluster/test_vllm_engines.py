"""Engines that run vLLM, without a vLLM: their settings, their devices, and how their output is read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cluster.device_assignment import (
    bound_to_cores,
    bound_to_devices,
    devices_each,
    devices_here,
    environments_of,
)
from services.cluster.engines import engines_of
from services.cluster.programs import BlockServer, VllmServer
from services.cluster.settings import ClusterSettings, VllmSettings, vllm_from_file
from tests.services.cli.running import refusal
from tests.services.cluster.living import PATIENCE_S

BLOCK = str(Path(sys.executable).with_name("block"))
VLLM = VllmServer(command="vllm", model="m", host="::", arguments=("--dtype", "half"), environment={})
ROOT_CAUSE = """\
(APIServer pid=1) INFO 11-21 12:22:14 [launcher.py:195] Route: /v1/completions, Methods: POST
(EngineCore pid=7) ERROR 11-21 12:22:15 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-21 12:22:15 [core.py:1510] ValueError: No available memory for the cache blocks.
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 1500, in run_engine_core
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
BAD_CONFIG = """\
(APIServer pid=1)   File "arg_utils.py", line 1, in create_model_config
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=1)   Value error, User-specified max_model_len (9) is greater than the derived max_model_len (8).
(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""

TOO_LONG = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, "
    "User-specified max_model_len (9) is greater than the derived max_model_len (8)."
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ROOT_CAUSE, "ValueError: No available memory for the cache blocks."),
        (
            BAD_CONFIG,
            TOO_LONG,
        ),
        ("usage: vllm serve\nvllm serve: error: unrecognized arguments: --blok-size", "vllm serve: error: unrecognized arguments: --blok-size"),
        ("Loading weights took 3 s\n\n", "Loading weights took 3 s"),
        ("", "no output"),
    ],
)  # fmt: skip
def test_what_was_wrong_is_found_in_the_last_lines(text: str, complaint: str) -> None:
    """The first exception is reported, not those that follow from it; without an exception, the last line."""
    assert VLLM.error_in(text.splitlines()) == complaint


def test_only_its_warnings_are_passed_on() -> None:
    """Other lines of vLLM are for debugging; lines of Block's servers are events."""
    levels = [VLLM.parsed(line).level for line in ROOT_CAUSE.splitlines()]
    assert levels[:3] == [logging.DEBUG, logging.ERROR, logging.ERROR]
    assert {*levels[3:]} == {logging.DEBUG}
    ours = BlockServer(arguments=("tagger",))
    assert ours.parsed('{"event": "serving", "level": "info", "port": 7}') == (logging.INFO, "serving", {"port": 7})
    assert ours.parsed("Traceback").level == logging.WARNING
    assert ours.error_in(['{"event": "loaded"}', "block: port: 7 is in use"]) == "port: 7 is in use"


def test_its_command_line() -> None:
    """It has the model, the address and the user's arguments; health is polled at an address that can be reached."""
    assert VLLM.command_line(81, None) == (
        "vllm", "serve", "m", "--host", "::", "--port", "81", "--dtype", "half",
    )  # fmt: skip
    assert VLLM.health_url(81) == "http://[::1]:81"


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine gets as many devices as it spreads over, all different, and only those that this process may use."""
    assert devices_each(("--tensor-parallel-size", "2", "-pp=3")) == 6
    assert bound_to_devices(2, 2, ("0", "1", "5", "7")) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "5,7"},
    ]
    with pytest.raises(ValueError, match="^instances: 2 of 2 devices are more than the 3 there are"):
        bound_to_devices(2, 2, ("0", "1", "2"))
    with pytest.raises(ValueError, match="^-tp: must be a whole number"):
        devices_each(("-tp", "two"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-12ab")
    assert devices_here() == ("3", "GPU-12ab")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices_here() == ()


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without devices each engine has its own cores, a part for each worker; too few cores are shared."""
    assert bound_to_cores(2, 1, range(5)) == [
        {"VLLM_CPU_OMP_THREADS_BIND": "0,1"},
        {"VLLM_CPU_OMP_THREADS_BIND": "2,3"},
    ]
    assert bound_to_cores(1, 2, range(4)) == [{"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,3"}]
    assert bound_to_cores(3, 1, range(2))[0]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert "VLLM_CPU_OMP_THREADS_BIND" in environments_of(1, (), ())[0]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    assert environments_of(2, (), ()) == [{}, {}]


def test_engines_are_told_where_to_show_their_state(tmp_path: Path) -> None:
    """Each engine has its own state file and port; mirrored engines export nothing."""
    files = [tmp_path / "engine-0.state", tmp_path / "engine-1.state"]
    vllm = VllmSettings(model="m", devices=("4", "5"), arguments=("--dtype", "half"))
    engines = engines_of(ClusterSettings(instances=2, vllm=vllm), (), files, None)
    environments = [engine._program.environment for engine in engines]
    assert [one["BLOCK_STATE_FILE"] for one in environments] == [*map(str, files)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["4", "5"]
    assert len({engine.port for engine in engines} - {0}) == 2
    (mirrored, _) = engines_of(ClusterSettings(instances=2, vllm=vllm, mirror=True), (), files, None)
    assert mirrored._program.environment["BLOCK_EXPORT"] == "0"
    assert "BLOCK_STATE_FILE" not in mirrored._program.environment


def test_a_table_for_vllm(tmp_path: Path) -> None:
    """The file may have what flags set; a bad value is refused by name."""
    file = tmp_path / "cluster.toml"
    file.write_text('[vllm]\nmodel = "m"\ncommand = "/opt/vllm"\narguments = ["--dtype", "half"]\n')
    assert vllm_from_file(str(file)) == {"model": "m", "command": "/opt/vllm", "arguments": ("--dtype", "half")}
    for text, message in (
        ("[vllm]\nmodle = 'm'\n", "modle: is no known setting; did you mean model?"),
        ("[vllm]\narguments = '--dtype half'\n", "arguments: must be a list of texts"),
        ("[vllm]\narguments = ['--port=7']\n", "arguments: --port is not for the engines of a cluster"),
        ("[vllm]\nmodel = '--dtype'\n", "model: must be a text, and no flag"),
        ("vllm = 3\n", "vllm: must be a table"),
    ):
        file.write_text(text)
        assert message in refusal("up", "-c", str(file))


BAD_FLAGS = (
    (["--vllm-command", "vllm"], "vllm: is missing"),
    (["--", "--dtype", "half"], "vllm: is missing"),
    (["--vllm", "m"], "profile: none is known for m; give --profile"),
    (["--vllm", "m", "-p", "nowhere"], "profile: there is none named 'nowhere'"),
    (["--vllm", "m", "-p", "constant", "--speed", "2"], "speed: is of emulated engines only"),
    (["--vllm", "m", "-p", "constant", "--", "--host", "x"], "arguments: --host is not for"),
)


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: list[str], message: str) -> None:
    """The error is one line, and nothing is started."""
    assert message in refusal("up", *flags)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise ValueError('no such model')", "did not start: ValueError: no such model"),
        (None, "No such file or directory"),
    ],
)
def test_an_engine_that_dies_at_start(tmp_path: Path, script: str | None, message: str) -> None:
    """The error is one line: the exception of the engine, or that its program is missing."""
    command = tmp_path / "vllm"
    if script is not None:
        command.write_text(f"#!{sys.executable}\n{script}\n")
        command.chmod(0o755)
    done = subprocess.run(
        [BLOCK, "up", "-n", "1", "--port", "0", "--log-level", "error", "--vllm", "m", "-p", "constant",
         "--vllm-command", str(command)],
        capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("block: engine-0 did not start: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
