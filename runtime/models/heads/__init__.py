"""Drafting heads: modules, the engines that grow trees with them, checkpoints."""
