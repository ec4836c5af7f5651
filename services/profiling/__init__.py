"""Measuring latency profiles: of a running engine, by its API and its state file, or of a model's kernels, by torch."""
