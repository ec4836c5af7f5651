"""A tokenizer without a vocabulary: a token is up to four bytes of a word, with the space before it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from predictor.request import EncoderInput
from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.engine_state.identity import short_hash

PIECE = re.compile(rb" ?[^\s]{1,4}|\s")
VOCABULARY = 1 << 40  # five bytes


def token_ids(text: str) -> list[int]:
    """Tokenize a text; a token's id is its bytes."""
    return [int.from_bytes(piece) for piece in PIECE.findall(text.encode("utf-8", "surrogatepass"))]


def token_text(token_id: int) -> str:
    """Return the text of a token."""
    return token_id.to_bytes(max(1, (token_id.bit_length() + 7) // 8)).decode("utf-8", "replace")


def text_of(ids: Sequence[int]) -> str:
    """Return the text of tokens, including characters that were split."""
    data = b"".join(token_id.to_bytes(max(1, (token_id.bit_length() + 7) // 8)) for token_id in ids)
    return data.decode("utf-8", "replace")


def content_hashes(
    ids: Sequence[int], block_size: int, adapter: tuple[str, str] | None = None, images: Sequence[EncoderInput] = ()
) -> tuple[int, ...]:
    """Hash the contents of the full blocks of these tokens, as a state file does."""
    return tuple(map(short_hash, kv_block_hashes(ids, block_size, adapter=adapter, images=images)))


def chat_text(messages: Sequence[tuple[str, str]], *, continues: bool = False) -> str:
    """Apply the chat template; a continued conversation has the earlier one as its prefix.

    An answer that `continues` the last message follows it at once.
    """
    turns = "".join(f"<|{role}|>\n{content}\n" for role, content in messages)
    return turns.removesuffix("\n") if continues else turns + "<|assistant|>\n"
