"""The deployment files: every command line in them is valid."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from scripts.lock_dependencies import IMAGE_EXTRAS
from services.cli import block
from services.instances.instance import instances_from_file
from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import need_vllm

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = DEPLOY / "compose" / "compose.yaml"
TAKES = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in sys.stdin:
    make_arg_parser(FlexibleArgumentParser()).parse_args(line.split())
"""


def command_of(unit: Path) -> list[str]:
    """Return the command line of a unit for instance 1, as systemd and the shell expand it."""
    text = unit.read_text().replace("%i", "1")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE))
    words = shlex.split(line.replace("$$", "$"))
    if words[:2] == ["/bin/sh", "-c"]:
        script = re.sub(r'"?\$(\w+)"?', lambda found: variables[found[1]], words[2])
        words = shlex.split(script.removeprefix("exec "))
    return words


def services() -> dict[str, dict[str, object]]:
    """The containers."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text()))["services"]


def commands(program: str) -> Iterator[list[str]]:
    """Return a program's command lines in units and containers."""
    for unit in UNITS:
        if (words := command_of(unit))[0].endswith(f"/{program}"):
            yield words[1:]
    for service in services().values():
        if program == "vllm" and service.get("entrypoint") == ["vllm", "serve"]:
            yield ["serve", *service["command"]]
        if program == "block" and "entrypoint" not in service:
            yield list(service["command"])


def test_our_commands_take_their_flags() -> None:
    """Each is parsed by the command itself, which refuses unknown flags and invalid values."""
    seen = set()
    for words in commands("block"):
        command: click.Command = block
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, list(words))
        seen.add(command.name)
    assert seen == {"predictor", "tagger", "scheduler", "gateway"}


def test_a_wrong_flag_is_refused() -> None:
    """The parser of the other tests refuses unknown flags."""
    with pytest.raises(click.NoSuchOption):
        block.commands["serve"].commands["tagger"].make_context("tagger", ["--prot", "1"])


def test_parts_find_each_other() -> None:
    """The configured addresses are those on which the services listen."""
    listen = {}
    for name, service in services().items():
        words = " ".join(map(str, service["command"])).replace("=", " ").split()
        listen[name] = int(words[words.index("--port") + 1])
    text = COMPOSE.read_text()
    configured = {
        (host, int(port)) for host, port in re.findall(r"([a-z]+(?:-\d)?):(\d{4,5})\b", text) if host in listen
    }
    assert {host for host, _ in configured} >= {"engine-0", "engine-1", "sidecar", "tagger", "scheduler"}
    assert all(listen[host] == port for host, port in configured)
    ports = {unit.stem: " ".join(command_of(unit)) for unit in UNITS}
    for unit in UNITS:
        for port in re.findall(r"127\.0\.0\.1:(\d+)", " ".join(command_of(unit))):
            assert any(f"--port {port}" in command for command in ports.values()), (unit.name, port)
    sidecars = {
        one.instance_id: one.sidecar_address for one in instances_from_file(str(DEPLOY / "systemd/instances.toml"))
    }
    assert sidecars["engine-1"] in ports["block-sidecar@"].replace("--port ", "127.0.0.1:")


def test_engines_and_sidecars_agree_on_state_files() -> None:
    """An engine and its sidecar have the same state file."""
    written = {
        service["environment"]["BLOCK_STATE_FILE"] for service in services().values() if "environment" in service
    }
    assert len(written) == 2
    assert all(any(file in word for word in services()["sidecar"]["command"]) for file in written)
    engine, sidecar = (DEPLOY / f"systemd/block-{part}@.service" for part in ("engine", "sidecar"))
    (file,) = re.findall(r"BLOCK_STATE_FILE=(\S+)", engine.read_text())
    assert f"--state-file {file}" in sidecar.read_text()
    users = {re.findall(r"^User=(\w+)$", unit.read_text(), re.MULTILINE)[0] for unit in UNITS}
    assert len(users) == 1  # only the writer's user can read a state file


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """The units verify without errors in systemd, where their programs exist."""
    for unit in UNITS:
        text = unit.read_text().replace("/opt/block/bin/block", "/bin/true")
        name = unit.name.replace("@.", "@1.")
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [shutil.which("systemd-analyze"), "verify", "--man=no", *sorted(map(str, tmp_path.glob("*.service")))],
        capture_output=True, text=True, check=False, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.vllm
def test_vllm_takes_its_flags() -> None:
    """The parser of vLLM accepts the engines' command lines."""
    need_vllm()
    lines = [" ".join(words[1:]) for words in commands("vllm")]
    assert len(lines) == 3
    done = subprocess.run(
        [interpreter(), "-c", TAKES], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_are_loaded_through_links(tmp_path: Path) -> None:
    """As in the image: the cache is a folder of links to files elsewhere, and nothing is compiled again."""
    source, module = tmp_path / "compiled", tmp_path / "doubling.py"
    module.write_text(
        "from predictor.compiled import kernel\n@kernel\ndef double(number):\n    return 2 * number\n\n"
        "assert double(21) == 42\nprint(sum(double.stats.cache_hits.values()))\n"
    )

    def hits(cache: Path) -> int:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(DEPLOY.parent)}
        done = subprocess.run([sys.executable, module], capture_output=True, text=True, check=True, env=environment)
        return int(done.stdout)

    assert hits(source) == 0
    linked = tmp_path / "linked"
    linked.mkdir()
    subprocess.run(["/bin/cp", "-rs", f"{source}/.", linked], check=True)
    assert hits(linked) == 1
    files = [path for path in linked.rglob("*") if not path.is_dir()]
    assert files
    assert all(path.is_symlink() for path in files)


def test_the_image_has_every_package() -> None:
    """What the wheel and the plug-in are built from is copied into the image, and sent to its builder."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    image, sent = (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for name in (*packages, "deploy/vllm_plugin"):
        assert f"COPY {name} /src/{name}\n" in image
        assert f"!{name}" in sent
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.*)$", image, re.MULTILINE) for source in line.split()[:-1]
    ]
    assert all((DEPLOY.parent / source).exists() for source in copied)
    assert {"kubernetes"} <= set(IMAGE_EXTRAS) <= set(project["project"]["optional-dependencies"])
    assert re.search(r"^USER 65532:65532$", image, re.MULTILINE)
