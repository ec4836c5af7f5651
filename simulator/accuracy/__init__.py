"""Windows of observed requests and steps, and how far the engine model is off on them."""
