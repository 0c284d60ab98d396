"""The heads as torch modules; build/heads trains them."""
