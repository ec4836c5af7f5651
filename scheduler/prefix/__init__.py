"""Estimates how much of a prompt each instance has in its prefix cache."""

from scheduler.prefix.index import Hits, PrefixIndex
from scheduler.prefix.prompt import PromptBlocks, PromptPrefixes, blocks_of_text
from scheduler.prefix.text import text_blocks

__all__ = ["Hits", "PrefixIndex", "PromptBlocks", "PromptPrefixes", "blocks_of_text", "text_blocks"]
