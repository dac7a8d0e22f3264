"""Ways to keep a program training on Slurm: one module each."""
