"""Open-loop load on any OpenAI endpoint: what is sent when, what came back, what it comes to."""
