"""The engine model on a virtual clock."""
