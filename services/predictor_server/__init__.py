"""The sidecar server: follows the engines of a node, and serves forecasts and reservations."""
