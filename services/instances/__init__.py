"""The instances that servers know: where their list comes from, what is registered, and what drains."""
