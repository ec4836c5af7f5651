"""Asks the public database of vulnerabilities about every package that is locked for the container image.

pip-audit does it, in an environment of its own. The exit status is 0 where nothing is known, 1 where a package has a
known vulnerability or is not in the database, and 3 where the database cannot be reached, which says nothing about the
packages.

    python scripts/audit_dependencies.py .venv-audit
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
LOCKS = ("deploy/requirements.lock", "deploy/build.lock")
UNREACHABLE = 3


def main() -> None:
    """Install pip-audit, run it and report what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="environment for pip-audit")
    folder = parser.parse_args().folder
    command = [str(folder / "bin" / "pip-audit"), "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    if not Path(command[0]).exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "pip-audit"], check=False).returncode:
            unreachable("pip-audit cannot be installed")
    command += [word for lock in LOCKS for word in ("--requirement", str(ROOT / lock))]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines() or ["no output"]
        unreachable(lines[-1])
    vulnerable = [(one, bug) for one in found for bug in one.get("vulns", ())]
    skipped = [one for one in found if "skip_reason" in one]
    if len(skipped) == len(found):
        unreachable(skipped[0]["skip_reason"] if skipped else "there are no packages")
    for one, bug in vulnerable:
        fixed = ", ".join(bug["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']}: {bug['id']}, fixed in {fixed}")
    for one in skipped:
        print(f"{one['name']}: not audited: {one['skip_reason']}")
    print(f"{len(found)} packages, {len(vulnerable)} known vulnerabilities, {len(skipped)} not audited")
    sys.exit(bool(vulnerable or skipped))


def unreachable(why: str) -> NoReturn:
    """End with the status that says nothing about the packages."""
    print(f"audit_dependencies: nothing was audited: {why}", file=sys.stderr)
    sys.exit(UNREACHABLE)


if __name__ == "__main__":
    main()
