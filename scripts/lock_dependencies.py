"""Writes the locks of the container image: every package with its version and the hashes of its files.

`deploy/requirements.lock` has what Block needs to run, with the extras of the image, and `deploy/build.lock` what
builds the wheels. `uv` resolves them (pip install uv); locked versions stay, unless --upgrade is given. --check
works without uv and without a network: it compares the locks with pyproject.toml.

    python scripts/lock_dependencies.py            # after a change of the dependencies
    python scripts/lock_dependencies.py --upgrade  # at a release
    python scripts/lock_dependencies.py --check
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECTS = (ROOT / "pyproject.toml", ROOT / "deploy" / "vllm_plugin" / "pyproject.toml")
LOCK, BUILD_LOCK = ROOT / "deploy" / "requirements.lock", ROOT / "deploy" / "build.lock"
IMAGE_EXTRAS = ("kubernetes",)
PYTHON_VERSION = "3.11"  # of the image
HEADER = "# Written by scripts/lock_dependencies.py, for pip install --require-hashes in the container image.\n"
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?P<marker>\s*;[^\\]*)?")
HASH = re.compile(r"^\s+--hash=sha256:[0-9a-f]{64}(?: \\)?$")
FOREIGN = re.compile(
    r"https?://|file:|^\s*(?:-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)\b|(?:^|\s)/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPackage:
    """One package of a lock."""

    version: str
    num_hashes: int


def wanted_by_image() -> list[str]:
    """Return the requirements of Block with the extras of its image."""
    project = tomllib.loads(PROJECTS[0].read_text(encoding="utf-8"))["project"]
    extras = [one for extra in IMAGE_EXTRAS for one in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras]


def wanted_by_build() -> list[str]:
    """Return what builds the wheels."""
    systems = [tomllib.loads(path.read_text(encoding="utf-8"))["build-system"] for path in PROJECTS]
    return sorted({one for system in systems for one in system["requires"]})


WANTED = {LOCK: wanted_by_image, BUILD_LOCK: wanted_by_build}


def locked_in(text: str) -> Mapping[str, LockedPackage]:
    """Read a lock: packages by their normalized names."""
    packages: dict[str, LockedPackage] = {}
    name = ""
    for line in text.splitlines():
        if found := PIN.match(line):
            name = canonicalize_name(found["name"])
            packages[name] = LockedPackage(version=found["version"], num_hashes=0)
        elif HASH.match(line) and name:
            package = packages[name]
            packages[name] = LockedPackage(version=package.version, num_hashes=package.num_hashes + 1)
    return packages


def problems_of(text: str, wanted: Sequence[str]) -> list[str]:
    """Return how a lock differs from what is wanted; empty where it does not."""
    packages = locked_in(text)
    problems = [f"{name}: has no hash" for name, package in packages.items() if not package.num_hashes]
    problems += [
        f"line {number}: names a place" for number, line in enumerate(text.splitlines(), 1) if is_foreign(line)
    ]
    environment = {**default_environment(), "python_version": PYTHON_VERSION, "sys_platform": "linux"}
    for one in map(Requirement, wanted):
        package = packages.get(canonicalize_name(one.name))
        if one.marker is not None and not one.marker.evaluate(environment):  # type: ignore[arg-type]
            continue
        if package is None:
            problems.append(f"{one.name}: is missing")
        elif not one.specifier.contains(package.version, prereleases=True):
            problems.append(f"{one.name}: {package.version} is locked, {one.specifier} is wanted")
    return problems


def is_foreign(line: str) -> bool:
    """Return whether a line names an index, a folder or a file."""
    return FOREIGN.search(line) is not None


def resolved(wanted: Sequence[str], lock: Path, *, upgrade: bool) -> str:
    """Have uv resolve requirements; return the text of the lock."""
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("lock_dependencies: uv is not installed: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock"
        if lock.exists() and not upgrade:
            out.write_text(lock.read_text(encoding="utf-8"), encoding="utf-8")  # its versions are preferred
        command = [uv, "pip", "compile", "-", "--output-file", str(out), "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--python-version", PYTHON_VERSION, "--python-platform", "linux", "--quiet"]
        done = subprocess.run(command, input="\n".join(wanted), text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"lock_dependencies: {done.stderr.strip()}")
        text = out.read_text(encoding="utf-8")
    return HEADER + "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"


def main() -> None:
    """Write the locks, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a lock does not fit pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="lock the newest versions")
    arguments = parser.parse_args()
    problems = []
    for lock, wanted in WANTED.items():
        name = lock.relative_to(ROOT)
        if not arguments.check:
            lock.write_text(resolved(wanted(), lock, upgrade=arguments.upgrade), encoding="utf-8")
        text = lock.read_text(encoding="utf-8") if lock.exists() else ""
        problems += [f"{name}: {problem}" for problem in problems_of(text, wanted())]
    if problems:
        sys.exit("\n".join([*problems, "lock_dependencies: run python scripts/lock_dependencies.py"]))


if __name__ == "__main__":
    main()
