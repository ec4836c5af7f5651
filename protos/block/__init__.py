"""Block's own protocol buffers, one folder per version."""
