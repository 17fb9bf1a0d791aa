"""The election: agents find the leader of the run, follow it, and campaign when it is lost."""
