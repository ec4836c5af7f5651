"""`python -m services.cli` is `block`."""

from __future__ import annotations

from services.cli import main

main()
