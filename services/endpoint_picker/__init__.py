"""The endpoint picker: places the requests of an Envoy, which asks by its external processing protocol."""
