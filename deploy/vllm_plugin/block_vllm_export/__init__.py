"""A vLLM plug-in: the engine's scheduler shows its state in shared memory, at every step."""

from __future__ import annotations

import logging
import os
import re

SUPPORTED = (0, 32)
log = logging.getLogger("vllm.block_export")  # below vLLM's own, so that it is seen where vLLM's lines are


def register() -> None:
    """Have every scheduler that vLLM makes from now on show its state; called by vLLM in each of its processes."""
    if os.environ.get("BLOCK_EXPORT", "1").lower() in {"0", "false", "no", "off"}:
        return
    try:
        import vllm

        if not is_supported(vllm.__version__):
            log.warning("block-vllm-export: supports vLLM 0.32, not %s; nothing is exported", vllm.__version__)
            return
        from vllm.config.scheduler import SchedulerConfig

        from .wrapping import wrap_scheduler_choice

        wrap_scheduler_choice(SchedulerConfig)
    except Exception:
        log.exception("block-vllm-export: cannot be set up; nothing is exported")


def is_supported(version: str) -> bool:
    """Tell whether this is a vLLM whose scheduler is known here."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return found is not None and (int(found[1]), int(found[2])) == SUPPORTED
