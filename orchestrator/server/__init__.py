"""All that knows Triton: requests, BLS clients, hosts, admission, the watch over other processes."""
