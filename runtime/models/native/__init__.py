"""The forward pass of decoders and drafting heads in C++ on a CPU; `python -m native` compiles them."""
