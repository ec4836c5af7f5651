"""The approximations that a forecast may contain, each as the one sentence by which explanations name it."""

from __future__ import annotations

from collections.abc import Iterable

MANY_RESPONSES = "the lengths of several responses are equally likely lengths of one tag"
MERGED_PROMPTS = "several prompts are forecast as one prompt with the tokens of all"
GRAMMAR_COMPILATION = (
    "the grammar of a structured output is compiled in an estimated time, after which the request arrives"
)
UNKNOWN_PREFIXES = "hits in the prefix cache are unknown, and none is counted"
PARTLY_KNOWN_PREFIXES = "hits in the prefix cache are known in part, because KV events were lost or came too late"
OFFLOADED_PREFIXES = "blocks on off-loading tiers are counted as hits of their own, and forecast as computed again"
REBUILT_STATE = "the state of the engine is rebuilt from the traffic through the sidecar"
UNKNOWN_RANKS = "the steps of some other data-parallel ranks, which set the pace as well, are unknown"
ESTIMATED_MEDIA = "the tokens of images or audio are estimated, as their size or the rule of the model is not known"
OTHER_MEDIA = "images and audio of the requests that are on the engine are not counted by its encoder budget"
ENCODER_TIME = "the time of the encoder is not known, and counted as 0"
LEARNT_ADAPTER_TIME = "the time to load the adapter is an estimate from earlier loads"
UNKNOWN_ADAPTER_TIME = "the time to load the adapter is not known, and counted as 0"
UNLIMITED_ADAPTERS = "how many adapters a step of the engine may have is not known, and not limited"

MAX_APPROXIMATIONS = 16  # of one forecast
MAX_LENGTH = 256  # characters of one


def not_modelled(setting: str) -> str:
    """Return the approximation that a setting of the engine is not modelled."""
    return f"the engine has {setting[: MAX_LENGTH // 2]}, which is not modelled"


def joined(*some: Iterable[str]) -> tuple[str, ...]:
    """Return all of several collections of approximations, each once, in their order."""
    return tuple(dict.fromkeys(sentence for sentences in some for sentence in sentences))
