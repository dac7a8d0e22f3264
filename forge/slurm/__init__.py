"""Slurm: its commands and their answers, jobs, requests, limits, checks before submission."""
