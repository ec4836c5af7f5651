"""Everything with a clock, a socket, a thread or a log line."""
