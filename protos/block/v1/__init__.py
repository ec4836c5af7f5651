"""Version 1 of the wire; its field numbers never change their meaning."""
