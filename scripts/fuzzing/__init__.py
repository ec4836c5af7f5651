"""Hostile inputs for everything that reads what it did not write: how they are made, and what must hold of each."""
