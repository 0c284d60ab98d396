"""Compiled engines through the executor bindings."""
