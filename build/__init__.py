"""Builds the demo models: corpus, tokenizer, training, export; it does not know the server."""
