"""The structure of the code: one public class of a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("predictor", "length_tagger", "scheduler", "simulator", "services", "deploy", "scripts")


def trees(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    """Parse the modules of some packages, without generated ones."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_there_is_one_public_class_of_a_name() -> None:
    """A name stands for one thing in the whole tree."""
    places = defaultdict(list)
    for path, tree in trees(*PACKAGES):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
