"""Token trees over the engine session; experimental."""
