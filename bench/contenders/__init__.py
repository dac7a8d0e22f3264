"""Training steps that bench.gpu compares: Forge's, and those of others, written as they do it."""
