"""The live page: what instances do, what was decided and why, and the outcomes."""
