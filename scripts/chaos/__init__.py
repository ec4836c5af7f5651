"""Chaos runs: parts of a cluster break under load by a plan, and nothing may be lost."""
