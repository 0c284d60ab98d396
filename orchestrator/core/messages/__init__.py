"""Packs calls of the target and of drafters, and their answers, as flat tensors, and unpacks them."""
