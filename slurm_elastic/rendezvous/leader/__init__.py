"""The leader: it listens to the agents, runs the membership machine, and carries out its decisions."""
