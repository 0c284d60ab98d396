"""The parts of `make bench`: what is measured, how it is taken together, how it is told."""
