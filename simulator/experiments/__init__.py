"""Experiments that TOML files declare, and their reports beside the papers' results."""
