"""Checkpoints: saved, committed, verified, chosen for a resume."""
