"""The workflow without a terminal: Snakemake in a Slurm job of its own."""
