"""Fuzzing: the pure parsers, guided by coverage, and the public contract of a running server and gateway."""
