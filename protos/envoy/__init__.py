"""The part of Envoy's protocols that Block speaks."""
