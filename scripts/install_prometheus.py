"""Unpack Prometheus and promtool from Debian's package into a folder; no service is installed or started.

The package index must be there: `apt-get update` writes it. On other systems, put the programs `prometheus` and
`promtool` into the search path instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")


def main() -> None:
    """Unpack the programs, unless they are there or in the search path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    if all(shutil.which(name) or (folder / name).is_file() for name in PROGRAMS):
        print("Prometheus is there already")
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit(f"there is no apt-get: put {' and '.join(PROGRAMS)} into the search path")
    with tempfile.TemporaryDirectory() as name:
        downloads = Path(name)
        run("apt-get", "download", "--quiet", "prometheus", at=downloads)
        (package,) = downloads.glob("prometheus_*.deb")
        run("dpkg-deb", "--extract", str(package), str(downloads / "files"), at=downloads)
        folder.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            shutil.copy2(downloads / "files" / "usr" / "bin" / program, folder / program)
    print(f"{' and '.join(PROGRAMS)} are in {folder}")


def run(*words: str, at: Path) -> None:
    """Run a command in a folder; its error ends this one."""
    done = subprocess.run(words, cwd=at, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words[:2])} failed; run apt-get update first?\n{done.stderr.strip()}")


if __name__ == "__main__":
    main()
