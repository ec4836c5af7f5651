"""Names for what prompts say, the same in every process, small whatever the prompt."""

from __future__ import annotations

from hashlib import blake2b

TEMPLATE_CHARACTERS = (
    256  # prompts that agree on so many were made by the same program, or follow the same instructions
)


def key(kind: str, *parts: str) -> int:
    """Hash a name of some kind to 64 bits."""
    digest = blake2b(digest_size=8, person=kind.encode())
    for part in parts:
        # any string a client can send has an encoding, lone surrogates too; the lengths keep the parts apart
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "big")


def prompt_keys(model: str, prompt: str) -> tuple[int, ...]:
    """Name what a prompt says, for one model; the most telling name first."""
    if len(prompt) < TEMPLATE_CHARACTERS:
        return ()
    return (key("template", model, prompt[:TEMPLATE_CHARACTERS]),)
