"""Ladder: small runs of several sizes and lengths, by which the loss of a larger one is forecast."""
