"""The workers of this node: their environment, processes, output and logs, and what torch does for them."""
