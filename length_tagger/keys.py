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
    """Name what a prompt says, for one model: its template, where it is long enough to have one, then all of it.

    Names of templates are even, those of whole prompts odd: whoever hears them back knows which is which.
    """
    if not prompt:
        return ()
    exact = key("prompt", model, prompt) | 1
    if len(prompt) < TEMPLATE_CHARACTERS:
        return (exact,)
    return (key("template", model, prompt[:TEMPLATE_CHARACTERS]) & ~1, exact)


def template_keys_of(keys: tuple[int, ...]) -> tuple[int, ...]:
    """Pick the names of templates."""
    return tuple(one for one in keys if not one & 1)


def exact_key_of(keys: tuple[int, ...]) -> int | None:
    """Pick the name of the whole prompt, if there is one."""
    return next((one for one in keys if one & 1), None)
