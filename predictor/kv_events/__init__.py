"""An engine's KV events: the order in which they are applied, and the prefix cache that they describe."""
