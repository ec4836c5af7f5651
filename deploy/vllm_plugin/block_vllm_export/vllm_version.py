"""Which version of vLLM runs here, and whose rules hold for it."""

from __future__ import annotations

import logging

from .predictor.vllm_versions import RULES, ChosenRules, rules_for

log = logging.getLogger("vllm.block_export")

OF_BATCHING_RULES = ((0, 32),)  # releases in which `tests/conformance/test_vllm_rules.py` passes


def running_version() -> str:
    """Return vLLM's own version."""
    import vllm

    return str(vllm.__version__)


def known_version() -> str:
    """Return vLLM's version for the engine model: the newest that is known for one like `dev`, which is no release."""
    version = running_version()
    try:
        rules_for(version)
    except ValueError:
        return ".".join(str(part) for part in max(RULES))
    return version


def chosen_rules() -> ChosenRules:
    """Return the rules by which this engine is forecast."""
    return rules_for(known_version())


def warn_of_nearest() -> None:
    """Log one line where the engine is forecast by another version's rules."""
    rules, version = chosen_rules(), running_version()
    if not rules.is_exact or known_version() != version:
        log.warning(
            "block-vllm-export: vLLM %s is not known; its state is exported, and forecast by the rules of %s",
            version, rules.name,
        )  # fmt: skip


def has_batching_rules() -> bool:
    """Return whether batching rules can be carried out in this version."""
    rules = chosen_rules()
    return rules.is_exact and rules.release in OF_BATCHING_RULES
