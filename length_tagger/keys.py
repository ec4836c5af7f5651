"""Keys that identify prompts and their templates: 64-bit hashes that are the same in every process."""

from __future__ import annotations

from hashlib import blake2b

TEMPLATE_CHARACTERS = 256  # prompts with the same beginning of this length have the same template


def key(kind: str, *parts: str) -> int:
    """Hash the parts of a key to 64 bits."""
    digest = blake2b(digest_size=8, person=kind.encode())
    for part in parts:
        # surrogatepass encodes any string, lone surrogates too; the lengths keep the parts apart
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "big")


def prompt_keys(model: str, prompt: str) -> tuple[int, ...]:
    """Return the keys of a prompt for one model: its template, if the prompt is long enough, then the whole prompt.

    Keys of templates are even and keys of whole prompts are odd, so that they can be distinguished later.
    """
    if not prompt:
        return ()
    exact = key("prompt", model, prompt) | 1
    if len(prompt) < TEMPLATE_CHARACTERS:
        return (exact,)
    return (key("template", model, prompt[:TEMPLATE_CHARACTERS]) & ~1, exact)


def template_keys_of(keys: tuple[int, ...]) -> tuple[int, ...]:
    """Return the keys of templates."""
    return tuple(one for one in keys if not one & 1)


def exact_key_of(keys: tuple[int, ...]) -> int | None:
    """Return the key of the whole prompt, if there is one."""
    return next((one for one in keys if one & 1), None)
