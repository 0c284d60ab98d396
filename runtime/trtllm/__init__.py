"""TensorRT-LLM engines behind the same contract: one shared adapter and in-flight table, four transports."""
