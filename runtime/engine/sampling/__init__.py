"""Noise, distribution, logits processors and acceptance on the device (torch)."""
