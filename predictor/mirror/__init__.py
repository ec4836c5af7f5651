"""An engine model kept true from outside: edited by what a proxy and the engine's metrics show."""
