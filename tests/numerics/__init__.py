"""How often float32 and bfloat16 pick another token than float64 (docs/numerics.md)."""
