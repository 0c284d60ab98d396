"""Acceptance length and speed of every method through the real server: `python -m benchmarks`."""
