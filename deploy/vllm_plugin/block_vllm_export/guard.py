"""Keeps errors of the export from reaching the engine."""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from typing import Any

from .exporter import Exporter
from .settings import UnsupportedError, state_file
from .vllm_version import running_version, warn_of_nearest

log = logging.getLogger("vllm.block_export")


class Guard:
    """Forwards calls to a scheduler's exporter; after the first failure, which is logged, it stops the export."""

    def __init__(self, scheduler: Any) -> None:
        """Start to export a scheduler's state, where that is possible."""
        self.exporter: Exporter | None = None
        try:
            path = state_file(scheduler)
            self.exporter = Exporter(path, scheduler)
        except UnsupportedError as error:
            log.warning("block-vllm-export: %s; nothing is exported", error)
        except AttributeError as error:  # another version of vLLM has another name
            log.error("block-vllm-export: vLLM %s differs: %s; nothing is exported", running_version(), error)  # noqa: TRY400
        except Exception:  # whatever fails, the engine must start
            log.exception("block-vllm-export: cannot start; nothing is exported")
        else:
            atexit.register(self, "close")
            warn_of_nearest()
            log.info("block-vllm-export: the scheduler's state is in %s", path)

    def __call__(self, action: str, *args: Any) -> None:
        """Call a method of the exporter; no exception reaches the engine."""
        if (exporter := self.exporter) is None:
            return
        try:
            getattr(exporter, action)(*args)
            failed = exporter.failure
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine must continue
            failed = error
        if failed is not None:
            self.exporter = None
            log.error("block-vllm-export: the export has failed and is stopped; the engine continues", exc_info=failed)
            with suppress(Exception):
                exporter.close()
        elif action == "close":
            self.exporter = None
