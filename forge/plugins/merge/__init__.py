"""Merge: a mean of checkpoints of a run in place of a decay of the learning rate."""
