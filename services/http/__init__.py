"""What all our HTTP servers in front of engines share: bodies read, clients told, headers passed on."""
