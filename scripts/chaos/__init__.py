"""Chaos runs: parts of a cluster break under load by a plan, and nothing may be lost."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is imported; it would note every process that starts
