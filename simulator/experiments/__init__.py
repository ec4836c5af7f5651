"""What the papers measured, as files that declare it, and what was measured here beside it."""
