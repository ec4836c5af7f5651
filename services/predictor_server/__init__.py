"""The sidecar: follows the engines of a node, and serves forecasts and reservations."""
