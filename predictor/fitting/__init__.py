"""Fits latency profiles to measurements, or estimates them by a roofline model where there are none."""
