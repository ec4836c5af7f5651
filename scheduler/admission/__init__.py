"""Requests that wait at a scheduler, not in an engine, until an instance admits them."""
