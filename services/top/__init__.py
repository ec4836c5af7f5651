"""A running cluster as a table in a terminal: what its instances do, and what its schedulers and gateways count."""
