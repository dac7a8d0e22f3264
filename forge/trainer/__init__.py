"""Forge's own training program: model, loss, optimizer, parallelism, the training loop."""
