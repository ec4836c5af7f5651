"""Instances and objectives of a Kubernetes cluster: a small client of its API, and the list that follows from it."""
