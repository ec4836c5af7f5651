"""Digests of source code, by which results of earlier runs are recognised as valid."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

SOURCES = ("predictor", "scheduler", "simulator")
EXCLUDED = (  # files and folders that do not change what a run measures
    "provisioning", "autoscaling", "autoscaling_comparison", "placement_bound", "charts", "claims", "experiment",
    "findings", "report", "report_page", "run_page", "timeline", "sizing", "source_digest",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def source_digest() -> str:
    """Return the digest of the code that results depend on: if it changes, they are measured again."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            parts = {*path.relative_to(ROOT).with_suffix("").parts}
            if path.suffix in (".py", ".json") and not parts & {*EXCLUDED}:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def digest_of(*paths: str, exclude: Sequence[str] = ()) -> str:
    """Return the digest of some files and folders, for results that depend on code that `source_digest` excludes."""
    digest = hashlib.sha256()
    for name in paths:
        for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]:
            if path.stem not in exclude:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
