"""Halving: a sweep whose worse runs stop, and whose best ones train on."""
