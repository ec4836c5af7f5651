"""From measurements to latency profiles: what is measured, the regression, and a roofline where nothing is."""
