"""What runs inside the `target` and `draft` Triton models: a PyTorch engine with paged, content-addressed KV and tree attention."""
