"""Choosing an instance for a request: indicators, policies, decisions; pure, used live and simulated alike."""
