"""Envoy's protocol of external processors, version 3."""
