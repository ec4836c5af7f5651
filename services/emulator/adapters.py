"""The LoRA adapters of an emulated engine, which requests name as their model: listed, loaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.emulator.errors import VllmError, invalid


def modules_from(texts: Iterable[str]) -> dict[str, str]:
    """Read adapters given as NAME=PATH; ValueError names the setting."""
    modules: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f"lora_modules: {text!r:.80} is not NAME=PATH")
        if name in modules:
            raise ValueError(f"lora_modules: {name!r} is a duplicate")
        modules[name] = path
    return modules


@dataclass(slots=True)
class ServedAdapters:
    """The adapters that can be named as a model, with their paths."""

    model: str
    is_enabled: bool = False
    paths: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        """Return whether requests may name an adapter."""
        return name in self.paths

    def load(self, body: Any) -> str:
        """Add an adapter, and return its name; VllmError with vLLM's message where that is not possible."""
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if not name or not path:
            raise _refused(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name == self.model:
            raise _refused(400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.paths and not body.get("load_inplace"):
            raise _refused(
                400,
                "InvalidUserInput",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        self.paths[name] = path
        return name

    def unload(self, body: Any) -> str:
        """Remove an adapter, and return its name; VllmError with vLLM's message where there is none."""
        name = _text(body, "lora_name")
        if not name:
            raise _refused(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self.paths:
            raise _refused(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.paths[name]
        return name

    def cards(self, created_s: int) -> list[dict[str, Any]]:
        """Return the adapters as entries of /v1/models."""
        return [
            {
                "id": name, "object": "model", "created": created_s, "owned_by": "vllm", "root": path,
                "parent": self.model, "max_model_len": None, "permission": [],
            }
            for name, path in self.paths.items()
        ]  # fmt: skip


def _text(body: Any, name: str) -> str:
    if not isinstance(body, Mapping):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid([{"type": "model_attributes_type", "loc": "body", "msg": message, "input": body}])
    value = body.get(name, "")
    if not isinstance(value, str):
        raise invalid(
            [{"type": "string_type", "loc": f"body.{name}", "msg": "Input should be a valid string", "input": value}]
        )
    return value


def _refused(status: int, kind: str, message: str) -> VllmError:
    return VllmError(status, message, kind=kind)
