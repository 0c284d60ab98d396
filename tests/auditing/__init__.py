"""Is a server's text its target's own? Checks that ask it as a client and decide its steps anew (docs/auditor.md)."""
