"""Everything with a clock, a socket, a thread or a log line."""

import os

# gRPC's older transport hands each event from one thread to another instead of two: a call takes a fifth less processor
# time, a message on a stream a third (scripts/bench_rpc.py). gRPC reads this once, when it is first imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
