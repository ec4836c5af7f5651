"""Adds the sources that the plug-in shares with Block to its wheel and sdist.

They are the writer of state files (`services/engine_state`), and the batching rules of the engine model with what they
import (`predictor`). The latter become a part of the plug-in's package, so that the environment of a vLLM needs no
other package of Block.
"""
# ruff: noqa: INP001 - hatchling runs this file by itself

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "block_vllm_export"
SHARED = ("identity.py", "layout.py", "process.py", "writer.py", "xargs.py")
MODEL = "predictor"
NEEDED = ("batching", "engine", "profile", "correction")  # of the model, with all that they import
IMPORT = re.compile(rf"^(\s*from ){MODEL}(\.[\w.]+)?( import )(\([^)]*\)|[^\n]*)", re.MULTILINE)


class SharedSource(BuildHookInterface):
    """Takes the shared files from the checkout; an sdist has them in the package already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files to be added."""
        if version == "editable":
            raise ValueError("block-vllm-export: cannot be installed as editable; leave -e out")
        plugin = Path(self.root)
        checkout = plugin.parents[1]
        for name in SHARED:
            source = checkout / "services" / "engine_state" / name
            if source.is_file():
                build_data["force_include"][str(source)] = f"{PACKAGE}/{name}"
            elif not (plugin / PACKAGE / name).is_file():
                raise FileNotFoundError(f"{source}: is missing; build from a checkout of Block, or from an sdist")
        if (checkout / MODEL).is_dir():
            self._rewritten = Path(tempfile.mkdtemp())
            for source in model_sources(checkout / MODEL):
                relative = source.relative_to(checkout)
                target = self._rewritten / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(in_package(source.read_text(encoding="utf-8")), encoding="utf-8")
                build_data["force_include"][str(target)] = f"{PACKAGE}/{relative}"
        elif not (plugin / PACKAGE / MODEL).is_dir():
            raise FileNotFoundError(f"{checkout / MODEL}: is missing; build from a checkout of Block, or from an sdist")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the rewritten files."""
        del version, build_data, artifact_path
        shutil.rmtree(getattr(self, "_rewritten", ""), ignore_errors=True)


def in_package(text: str) -> str:
    """Let a source import the model from where it is in the plug-in."""
    return IMPORT.sub(rf"\1{PACKAGE}.{MODEL}\2\3\4", text)


def model_sources(model: Path) -> list[Path]:
    """Return the modules that the plug-in needs, with all that they import, and the profiles that ship."""
    found = {model / "__init__.py", *(model / "profiles").glob("*.json")}
    left = [path for name in NEEDED for path in modules(model, name)]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            for _, module, _, names in IMPORT.findall(path.read_text(encoding="utf-8")):
                inside = module.lstrip(".").replace(".", "/")
                left += modules(model, inside)
                for name in re.findall(r"\w+", names):
                    left += modules(model, f"{inside}/{name}".lstrip("/"))
    return sorted(found)


def modules(model: Path, name: str) -> list[Path]:
    """Return the files of a module or of a package with this name; none where it is neither."""
    if (model / f"{name}.py").is_file():
        return [model / f"{name}.py"]
    return sorted((model / name).glob("*.py")) if name and (model / name).is_dir() else []
