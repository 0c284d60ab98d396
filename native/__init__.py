"""C++ libraries, compiled on first use with the compiler at hand: how they are built, and sampling for all rows."""
