"""The provisioner: sizes the pool of instances."""
