"""NVIDIA's Triton backend `tensorrtllm` as a target (docs/tensorrt-llm.md); experimental, never run on an engine."""
