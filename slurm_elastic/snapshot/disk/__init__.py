"""Snapshots on disk: complete directories that later runs and torch read, written by a process of the agent."""
