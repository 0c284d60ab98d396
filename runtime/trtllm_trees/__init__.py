"""EXPERIMENTAL: token trees on a compiled engine, by TensorRT-LLM's runtime Session (docs/tensorrt-llm.md).

Layouts and names come from TensorRT-LLM's sources (up to 1.2.1). Nothing here has been run on an engine.
"""
