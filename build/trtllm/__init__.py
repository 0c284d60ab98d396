"""Plans and builds TensorRT-LLM engines: spec -> plan -> stages in the container (docs/tensorrt-llm.md)."""
