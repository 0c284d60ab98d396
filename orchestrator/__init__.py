"""Runs requests: the loop, the proposers, the calls to the engines. Holds no weights and imports no torch."""
