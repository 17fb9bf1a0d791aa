"""A run as people and programs outside of it see it: read from its run directory, never changed."""
