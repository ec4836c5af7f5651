"""Other routers: they are installed into environments of their own under `.venv-peers/`, and run.

The Rust router comes from PyPI as `vllm-router`. production-stack's router has the same name, but is not on PyPI: it is
installed from its source tree or a wheel, and needs Python 3.12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.bench_requests import MODEL, PLACE
from scripts.processes import ROOT, START_S, Running, last_line, started
from services.cluster.engines import free_port

ENVIRONMENTS = ROOT / ".venv-peers"
DISTRIBUTION = "vllm-router"  # the name of both
RUST_ROUTER, PRODUCTION_STACK = "vllm-router", "production-stack"
RUST_ROUTER_VERSION = "0.1.17"
PYTHON_OF_STACK = (3, 12)
INSTALL_S = 600
MAX_MESSAGE = 300  # characters


class UnavailableError(Exception):
    """A router cannot be run here, for the reason in the message."""


def install_rust_router(*, again: bool) -> str:
    """Install the Rust router if it is missing; return its version."""
    if again or installed_version(RUST_ROUTER) != RUST_ROUTER_VERSION:
        install(RUST_ROUTER, sys.executable, f"{DISTRIBUTION}=={RUST_ROUTER_VERSION}")
    return installed_version(RUST_ROUTER)


def install_production_stack(source: str, *, again: bool) -> str:
    """Install production-stack's router if it is missing; return its version."""
    if source and (again or not installed_version(PRODUCTION_STACK)):
        install(PRODUCTION_STACK, python_of_stack(), source)
    version = installed_version(PRODUCTION_STACK)
    if not version:
        raise UnavailableError(
            f"not on PyPI, where its name, {DISTRIBUTION}, is the Rust router's: give its source by --production-stack"
        )
    return version


def python_of_stack() -> str:
    """Return an interpreter that is new enough for production-stack's router."""
    for name in ("python3.12", sys.executable, "python3"):
        probe = f"import sys; sys.exit(sys.version_info < {PYTHON_OF_STACK})"
        with suppress(OSError):
            if subprocess.run([name, "-c", probe], capture_output=True, check=False).returncode == 0:
                return name
    raise UnavailableError("needs Python 3.12, which is not installed")


def environment_of(peer: str) -> Path:
    """Return the folder in which a peer is installed."""
    return ENVIRONMENTS / peer


def variables_of(peer: str) -> dict[str, str]:
    """Return the environment variables for a peer's programs: nothing of this project is on their path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**variables, "PATH": f"{environment_of(peer) / 'bin'}{os.pathsep}{variables.get('PATH', '')}"}


def installed_version(peer: str) -> str:
    """Return the version that a peer's environment has installed; empty if none."""
    python = environment_of(peer) / "bin" / "python"
    if not python.exists():
        return ""
    probe = f"import importlib.metadata as m; print(m.version({DISTRIBUTION!r}))"
    done = subprocess.run([python, "-c", probe], env=variables_of(peer), capture_output=True, text=True, check=False)
    return done.stdout.strip()


def install(peer: str, python: str, requirement: str) -> None:
    """Create a peer's environment, replacing an earlier one."""
    environment = environment_of(peer)
    print(f"installing {requirement} into {environment.relative_to(ROOT)}", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)
    variables = variables_of(peer)
    if not Path(requirement, ".git").exists():  # without its history a source tree cannot tell its version
        variables["SETUPTOOLS_SCM_PRETEND_VERSION"] = "0"
    pip = [str(environment / "bin" / "pip"), "--quiet", "--disable-pip-version-check", "install", requirement]
    try:
        for command in ([python, "-m", "venv", str(environment)], pip):
            subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError as failed:
        lines = [line.strip() for line in failed.stderr.splitlines() if line.strip()] or ["it printed nothing"]
        why = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise UnavailableError(f"cannot be installed: {why[:MAX_MESSAGE]}") from None
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise UnavailableError(f"cannot be installed: {str(failed)[:MAX_MESSAGE]}") from None


@contextmanager
def rust_router_before(engines: Sequence[str], policy: str) -> Iterator[Running]:
    """Run the Rust router; its second port is for its metrics."""
    flags = ["--worker-urls", *engines, "--policy", policy, "--worker-startup-check-interval", "1"]
    with peer_running(RUST_ROUTER, [*flags, "--prometheus-port", str(free_port(PLACE))]) as running:
        yield running


@contextmanager
def production_stack_before(engines: Sequence[str], policy: str) -> Iterator[Running]:
    """Run production-stack's router."""
    flags = ["--service-discovery", "static", "--static-backends", ",".join(engines)]
    flags += ["--static-models", ",".join(len(engines) * [MODEL]), "--routing-logic", policy]
    with peer_running(PRODUCTION_STACK, flags) as running:
        yield running


@contextmanager
def peer_running(peer: str, flags: Sequence[str]) -> Iterator[Running]:
    """Run a router with its own defaults until the block of code ends; its output goes into a file."""
    port = free_port(PLACE)
    command = [str(environment_of(peer) / "bin" / "vllm-router"), "--host", PLACE, "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile() as log, started(command, variables_of(peer), stdout=log, stderr=log) as process:
        deadline_s = time.monotonic() + START_S
        while not healthy(port):
            if process.poll() is not None:
                raise UnavailableError(f"ended with status {process.returncode}: {last_line(log)}")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"is not healthy after {START_S:.0f} s: {last_line(log)}")
            time.sleep(0.1)
        yield Running(process=process, port=port)


def healthy(port: int) -> bool:
    """Return whether a router responds and is healthy."""
    try:
        with urllib.request.urlopen(f"http://{PLACE}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
