"""What a forecast of a request with a LoRA adapter, or with images, only approximates on an engine."""

from __future__ import annotations

from predictor.approximations import (
    ENCODER_TIME,
    LEARNT_ADAPTER_TIME,
    OTHER_MEDIA,
    UNKNOWN_ADAPTER_TIME,
    UNLIMITED_ADAPTERS,
)
from predictor.engine_view import EngineView
from predictor.request import adapter_number
from protos.block.v1 import common_pb2


def input_approximations(message: common_pb2.Request, view: EngineView) -> tuple[str, ...]:
    """Return the approximations by what is known of the engine."""
    named: list[str] = []
    config = view.engine.config
    if message.adapter and not config.max_loras:
        named.append(UNLIMITED_ADAPTERS)
    elif message.adapter:
        named += _of_adapter(message.adapter, view)
    if message.encoder_inputs:
        if config.max_num_encoder_input_tokens:
            named.append(OTHER_MEDIA)
        if not config.encoder_token_s:
            named.append(ENCODER_TIME)
    return tuple(named)


def _of_adapter(adapter: str, view: EngineView) -> list[str]:
    """Name how well the time is known in which the adapter is loaded, where it must be."""
    number, head = adapter_number(adapter), view.engine.state.engine[0]
    if any(one.number == number and one.is_active for one in view.engine.adapters()):
        return []
    return [LEARNT_ADAPTER_TIME if head.lora_load_s + head.lora_activate_s > 0 else UNKNOWN_ADAPTER_TIME]
