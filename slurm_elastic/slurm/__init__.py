"""What Slurm says and what is asked of it."""
