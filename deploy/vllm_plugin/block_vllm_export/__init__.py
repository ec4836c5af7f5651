"""A vLLM plug-in that exports the state of the engine's scheduler to shared memory at every step."""

from __future__ import annotations

import logging
import os

from . import nixl_on_cpu

log = logging.getLogger("vllm.block_export")  # below vLLM's logger, so that its lines appear among vLLM's


def register() -> None:
    """Make every scheduler that vLLM creates from now on export its state; vLLM calls it in each of its processes."""
    if nixl_on_cpu.is_asked_for():
        try:
            nixl_on_cpu.adapt()
        except Exception:  # whatever fails, the engine must start
            log.exception("block-vllm-export: NIXL cannot be adapted to few cores")
    if os.environ.get("BLOCK_EXPORT", "1").lower() in {"0", "false", "no", "off"}:
        return
    try:
        from vllm.config.scheduler import SchedulerConfig

        from .wrapping import wrap_scheduler_choice

        wrap_scheduler_choice(SchedulerConfig)
    except Exception:  # whatever fails, the engine must start
        log.exception("block-vllm-export: cannot be set up; nothing is exported")
