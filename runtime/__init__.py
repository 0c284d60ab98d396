"""The engines behind the Triton models."""
