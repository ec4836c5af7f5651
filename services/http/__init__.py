"""HTTP: a base for servers, a client, request bodies, event streams, prompts in tokens."""
