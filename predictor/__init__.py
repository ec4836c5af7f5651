"""The engine model: what an LLM engine will do next, step by step, and how long it takes."""
