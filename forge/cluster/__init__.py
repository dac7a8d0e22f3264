"""Slurm and hosts: jobs, nodes, placement, network, locks, checks before submission."""
