"""How much of a prompt instances have cached already, as far as can be told from where prompts were sent."""

from scheduler.prefix.index import Hits, PrefixIndex
from scheduler.prefix.text import text_blocks

__all__ = ["Hits", "PrefixIndex", "text_blocks"]
