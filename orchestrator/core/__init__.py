"""The types that everything shares: tree, context, sampling parameters, step types, noise, errors."""
