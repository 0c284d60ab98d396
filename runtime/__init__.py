"""What runs inside `target` and `draft`: a PyTorch engine with paged, content-addressed KV and tree attention."""
