"""A client's inputs, their checks and defaults, and the generation request built from them."""
