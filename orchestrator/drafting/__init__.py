"""One file for each drafting method, the registry of methods, and the wrappers around proposers."""
