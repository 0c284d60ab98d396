"""What the Makefile runs besides the servers and the tests; stdlib only, except `lock` and `configuration`."""
