"""Published checkpoints of heads: files, checks, loading, tables borrowed from the target."""
