"""Workflow: what the Snakefile and its rule files use, and the inside of Snakemake."""
