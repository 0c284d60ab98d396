"""Trains, measures and publishes drafting heads for any causal language model: `python -m build.heads`."""
