"""Clients of the public model: single files that people copy; they know its protocol only."""
