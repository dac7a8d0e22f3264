"""What is tested on a real Slurm."""
