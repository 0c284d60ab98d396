"""A Hugging Face causal LM with our attention: loading, checks, fused layers, hidden states."""
