"""Adds the writer of state files, whose source is `services/engine_state`, to the plug-in's wheel and sdist."""
# ruff: noqa: INP001 - hatchling runs this file by itself

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "block_vllm_export"
SHARED = ("identity.py", "layout.py", "process.py", "writer.py", "xargs.py")


class SharedSource(BuildHookInterface):
    """Takes the shared files from the checkout; an sdist has them in the package already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files to be added."""
        if version == "editable":
            raise ValueError("block-vllm-export: cannot be installed as editable; leave -e out")
        plugin = Path(self.root)
        checkout = plugin.parents[1] / "services" / "engine_state"
        for name in SHARED:
            if (checkout / name).is_file():
                build_data["force_include"][str(checkout / name)] = f"{PACKAGE}/{name}"
            elif not (plugin / PACKAGE / name).is_file():
                raise FileNotFoundError(
                    f"{checkout / name}: is missing; build from a checkout of Block, or from an sdist"
                )
