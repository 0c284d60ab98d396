"""Compiled engines through NVIDIA's Triton backend; experimental."""
