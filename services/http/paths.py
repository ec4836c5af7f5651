"""The paths at which engines generate text, as requests name them."""

from __future__ import annotations

COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
