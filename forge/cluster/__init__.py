"""Slurm and the hosts: jobs, nodes, placement, network, locks, checks before submission."""
