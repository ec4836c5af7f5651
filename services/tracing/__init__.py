"""Traces of requests by OpenTelemetry, whose packages are an extra: without an OTLP endpoint none is imported."""
