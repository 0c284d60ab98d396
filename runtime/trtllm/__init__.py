"""TensorRT-LLM engines: one client over three transports (executor, backend, llm_api)."""
