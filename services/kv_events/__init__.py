"""KV events of engines over ZeroMQ: vLLM's format, a subscriber with replays, and the emulated engine's publisher."""
