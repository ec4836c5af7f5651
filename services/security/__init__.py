"""Who may connect, and who may do what."""
