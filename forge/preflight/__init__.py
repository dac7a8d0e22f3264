"""Checks of nodes and ranks before training."""
