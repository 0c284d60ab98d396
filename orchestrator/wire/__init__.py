"""Calls to target and drafters as flat tensors, and back."""
