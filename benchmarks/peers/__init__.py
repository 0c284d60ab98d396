"""Other software that can serve the same weights, as runners in this process: transformers and llama.cpp."""
