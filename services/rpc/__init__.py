"""gRPC: servers, channels, messages, and the statuses of errors."""
