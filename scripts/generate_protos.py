"""Generates the code beside the .proto files, or, with --check, verifies that it is up to date."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
FOLDERS = (Path("protos/block/v1"), Path("protos/envoy/v3"))
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
BIN = Path(sys.executable).parent


def main() -> int:
    """Generate or compare; the exit status is 1 if the code is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    if not parser.parse_args().check:
        return generate(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        return generate(Path(scratch)) or max(compare(folder, Path(scratch)) for folder in FOLDERS)


def generate(into: Path) -> int:
    """Run protoc over every .proto file."""
    sources = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    status: int = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            *(f"--plugin={name}={BIN / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
            f"--python_out={into}",
            f"--grpc_python_out={into}",
            f"--mypy_out=quiet:{into}",
            f"--mypy_grpc_out=quiet:{into}",
            *sources,
        ]
    )
    return status


def compare(folder: Path, scratch: Path) -> int:
    """Print the generated files of a folder that differ, are missing, or have no source; return the exit status."""
    existing, generated = ROOT / folder, scratch / folder
    names = {path.name for folder in (existing, generated) for path in folder.iterdir() if path.name.endswith(SUFFIXES)}
    stale = [name for name in sorted(names) if content(existing / name) != content(generated / name)]
    for name in stale:
        print(f"{folder / name}: is out of date; run scripts/generate_protos.py", file=sys.stderr)
    return 1 if stale else 0


def content(path: Path) -> bytes | None:
    """Read a file that may not exist."""
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
