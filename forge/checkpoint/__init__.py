"""Checkpoints: write, commit, verify, and choose from which to resume."""
