"""Failures of workers: their causes, whether one is the last one again, nodes with strikes, and loops. Pure."""
