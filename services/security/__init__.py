"""TLS between the parts of Block, and what protects its servers."""
