"""The speculative-decoding loop and everything it is made of; knows neither torch nor, outside `orchestrator.triton`, Triton."""
