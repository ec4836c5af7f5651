"""The vLLM plug-in in a folder beside an unmodified vLLM, as an init container brings it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import need_vllm
from tests.deploy.helm_chart import MATRIX, containers, rendered
from tests.deploy.installing import PLUGIN, pip_install

FINDS = """
import importlib.metadata, json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config.scheduler import SchedulerConfig
found = [one.dist.locate_file('') for one in importlib.metadata.entry_points(group='vllm.general_plugins')
         if one.name == 'block_export']
print(json.dumps([list(map(str, found)), hasattr(SchedulerConfig.get_scheduler_cls, '__wrapped__')]))
"""
TAKES = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in sys.stdin:
    validate_parsed_serve_args(make_arg_parser(FlexibleArgumentParser()).parse_args(line.split()))
"""


@pytest.mark.vllm
def test_vllm_finds_the_plug_in_by_pythonpath(tmp_path: Path) -> None:
    """Its packages have nothing of ours; with the folder on PYTHONPATH its schedulers export their state."""
    need_vllm()
    folder, packages = tmp_path / "vllm-plugin", tmp_path / "packages"
    pip_install(PLUGIN, folder)
    packages.mkdir()
    (site,) = (interpreter().parent.parent / "lib").glob("python3.*/site-packages")
    for entry in site.iterdir():
        if not entry.name.startswith("block_vllm_export"):
            (packages / entry.name).symlink_to(entry)

    def found(*paths: Path) -> list[object]:
        done = subprocess.run(
            [interpreter().resolve(), "-S", "-c", FINDS], capture_output=True, text=True, check=False, timeout=300,
            env={"PYTHONPATH": ":".join(map(str, paths)), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return list(json.loads(done.stdout.splitlines()[-1]))

    assert found(packages) == [[], False]
    assert found(folder, packages) == [[str(folder)], True]


@pytest.mark.vllm
def test_vllm_takes_the_flags_of_the_chart() -> None:
    """Parsed and validated: the command lines of the chart's engines, also those of several ranks."""
    need_vllm()
    names = [name for name in MATRIX if "engines" in MATRIX[name]]
    engines = [one for name in names for one in containers(rendered(name)) if one["name"] == "vllm"]
    assert len(engines) > len(names)
    assert all(one["command"] == ["vllm", "serve"] for one in engines)
    lines = "\n".join(" ".join(one["args"]) for one in engines)
    done = subprocess.run([interpreter(), "-c", TAKES], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
