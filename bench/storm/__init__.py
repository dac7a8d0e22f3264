"""Goodput of training under preemption: the same events hit several ways to keep one program training."""
