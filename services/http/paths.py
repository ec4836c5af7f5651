"""The paths of engines, as requests name them."""

from __future__ import annotations

COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
RESPONSES = b"/v1/responses"
MESSAGES, COUNT_TOKENS = b"/v1/messages", b"/v1/messages/count_tokens"
POOLING = (b"/v1/embeddings", b"/v2/embed", b"/pooling", b"/classify")
SCORING = (b"/v1/score", b"/score", b"/v1/rerank", b"/v2/rerank", b"/rerank")
TOKENIZE, DETOKENIZE = b"/tokenize", b"/detokenize"
TRANSCRIPTIONS = (b"/v1/audio/transcriptions", b"/v1/audio/translations")
SPEECH = b"/v1/audio/speech"
REALTIME = "/v1/realtime"
