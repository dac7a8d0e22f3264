"""A real Slurm cluster on one machine: for people (`make slurm-up`), tests and measurements."""
