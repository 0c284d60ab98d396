"""The speculative-decoding loop and its parts; knows neither torch nor, outside `orchestrator.triton`, Triton."""
