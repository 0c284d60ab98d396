"""The LLM API (PyTorch backend); experimental."""
