"""TensorRT-LLM's LLM API (PyTorch backend, no compiled engine) behind the target's contract; it drafts by itself.

EXPERIMENTAL: nothing here has been run with the library. Nothing imports it when this is imported itself.
"""
