"""Independent checks of checkpoints in fresh processes."""
