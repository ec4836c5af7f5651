"""Metrics of TLS: when certificates expire, and what made handshakes and reloads fail."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.security.certificates import Certificates


class TlsMetrics(Collector):
    """Reads the certificates of a process whenever metrics are asked for."""

    def __init__(self, certificates: Certificates) -> None:
        """Take the certificates."""
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        expiry = GaugeMetricFamily(
            "block_tls_certificate_not_after_timestamp_seconds",
            "When a certificate expires, in Unix time: the process's own (cert, client_cert) and its CAs.",
            labels=("use",),
        )
        for use, at_s in self._certificates.not_after().items():
            expiry.add_metric((use,), at_s)
        yield expiry
        failures = CounterMetricFamily(
            "block_tls_handshake_failures",
            "TLS handshakes that failed, by the side of this process and the reason. A gRPC server counts calls of "
            "peers that are not allowed; its other failures are counted by the clients.",
            labels=("side", "reason"),
        )
        for (side, reason), num in self._certificates.handshakes.counts.items():
            failures.add_metric((side, reason), num)
        yield failures
        yield CounterMetricFamily(
            "block_tls_reload_failures",
            "Changes of certificate files that could not be used.",
            value=self._certificates.num_failed_reloads,
        )


def register_tls_metrics(registry: CollectorRegistry, certificates: Certificates) -> None:
    """Expose the metrics of TLS, where any certificate is set."""
    tls = certificates.tls
    if tls.serves_tls or tls.tls_ca:
        registry.register(TlsMetrics(certificates))
