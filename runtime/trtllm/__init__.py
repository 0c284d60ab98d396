"""Engines of TensorRT-LLM behind the contract of our own: one executor request a step, chains verified by token match.

Nothing here imports tensorrt_llm when it is imported itself; `library.load_library` does.
"""
