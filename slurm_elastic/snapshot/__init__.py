"""Snapshots of the training state in memory that agents hold."""
