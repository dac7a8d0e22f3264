"""A real Slurm cluster on one machine, and what is tested on it."""
