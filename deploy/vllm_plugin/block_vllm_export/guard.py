"""What keeps an error of the export's from becoming one of the engine's."""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from typing import Any

from .exporter import Exporter
from .settings import UnsupportedError, state_file

log = logging.getLogger("vllm.block_export")


class Guard:
    """Passes calls on to a scheduler's exporter, until the first one that fails: that is said, and was the last."""

    def __init__(self, scheduler: Any) -> None:
        """Begin to show a scheduler's state, if that can be."""
        self.exporter: Exporter | None = None
        try:
            path = state_file(scheduler)
            self.exporter = Exporter(path, scheduler)
        except UnsupportedError as error:
            log.warning("block-vllm-export: %s; nothing is exported", error)
        except Exception:
            log.exception("block-vllm-export: cannot begin; nothing is exported")
        else:
            atexit.register(self, "close")
            log.info("block-vllm-export: the scheduler's state is in %s", path)

    def __call__(self, action: str, *args: Any) -> None:
        """Have the exporter do something; nothing that comes of it reaches the engine."""
        if (exporter := self.exporter) is None:
            return
        try:
            getattr(exporter, action)(*args)
            failed = exporter.failure
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine runs on
            failed = error
        if failed is not None:
            self.exporter = None
            log.error("block-vllm-export: given up, the engine runs on without", exc_info=failed)
            with suppress(Exception):
                exporter.close()
        elif action == "close":
            self.exporter = None
