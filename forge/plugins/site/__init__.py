"""`forge profile`: a profile for a cluster, from what its Slurm says."""
