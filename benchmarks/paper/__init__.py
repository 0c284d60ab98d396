"""The experiments of the papers that this server's methods come from, as one command: `make paper`."""
