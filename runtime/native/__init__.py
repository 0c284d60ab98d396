"""The forward pass of Llama-like models in C++ on a CPU (`kernels = "native"`), compiled on first use."""
