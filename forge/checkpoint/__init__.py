"""Checkpoints: write, commit, verify, and choose the one to resume from."""
