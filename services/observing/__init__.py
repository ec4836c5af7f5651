"""Observes what engines serve: by their state files, by their traffic, or from recordings of schedulers."""
