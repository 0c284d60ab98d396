"""Trains, measures and publishes drafting heads for a causal language model: `python -m build.heads`."""
