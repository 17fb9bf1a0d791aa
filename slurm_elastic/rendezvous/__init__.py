"""Who is in the next round, and how agents agree on it."""
