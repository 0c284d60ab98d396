"""A client's inputs, their checks and defaults, and the generation request that follows from them."""
