"""Trainings by frameworks, as their users write them, for :mod:`benchmarks.frameworks` and the cluster's tests."""
