"""Measuring how long a running engine's steps take, through its public API and the state that it shows."""
