"""The wire: protocol buffers, and the code generated from them beside each (scripts/generate_protos.py)."""
