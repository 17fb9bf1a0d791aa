"""The releases of torch, Python and Slurm with which the tests are run: ``make test-matrix``."""
