"""The asyncio driver of the decision core: sidecar connections, forecast fan-out, reservations, outcomes.

The scheduler serves it over gRPC; a gateway may run it in its own process.
"""
