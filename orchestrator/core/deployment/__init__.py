"""serving.toml, checkpoints, engine manifests, and what each engine can serve."""
