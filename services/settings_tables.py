"""The tables that a settings file may have: one for each kind of process, and one for a whole cluster."""

TABLES = ("cluster", "gateway", "scheduler", "predictor", "tagger", "engine", "vllm", "provisioner", "bench")
