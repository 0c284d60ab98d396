"""Paged KV memory: blocks found by content, the cache, sequences, and the layout of a batch."""
