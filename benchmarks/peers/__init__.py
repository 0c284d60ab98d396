"""What else could serve the same weights on this machine, as runners: transformers and llama.cpp, in this process."""
