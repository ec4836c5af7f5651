"""The gateway: serves OpenAI's endpoints, gets decisions from schedulers, and forwards requests to engines."""
