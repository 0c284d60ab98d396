"""Proves on a running server that its text is the target's own: `python -m auditor`."""
