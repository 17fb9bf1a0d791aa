"""Trainings that benchmarks run, by frameworks as their users write them, too; the cluster's tests run some of them."""
