"""What every part needs: config, machine, names of files, errors, events. No torch, no Slurm."""
