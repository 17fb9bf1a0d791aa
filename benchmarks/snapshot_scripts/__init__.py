"""Trainings of :mod:`benchmarks.lost_steps`."""
