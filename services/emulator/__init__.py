"""An emulated engine: the engine model on the wall clock, behind the HTTP surface of vLLM 0.32."""
