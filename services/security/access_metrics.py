"""Prometheus metrics of keys, roles and the audit log."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AccessMetrics:
    """Counts refused calls and lost audit lines, and shows whether the key file is valid."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything."""
        self.refused = Counter(
            "block_access_refused",
            "Refused calls, by reason: an unknown or missing key (invalid_key), expired_key, a role that may not do it "
            "(no_permission), a model that the key may not use (model), or the limit of a key or tenant that is "
            "reached.",
            ("reason",),
            registry=registry,
        )
        self.valid = Gauge(
            "block_api_key_file_valid",
            "1: the last version of the key file is in use; 0: it is invalid, and the one before is in use.",
            registry=registry,
        )
        self.audit_lost = Counter(
            "block_audit_lines_lost",
            "Lines that the audit log lacks: its queue was full (full), its file could not be written (failed), or "
            "too many refusals came (rate).",
            ("reason",),
            registry=registry,
        )
