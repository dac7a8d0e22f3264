"""Shared by every package: config, machine, names of files, errors, events. No torch, no Slurm."""
