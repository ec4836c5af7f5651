"""The mirror: an engine model that follows an engine from outside, by its requests and its metrics."""
