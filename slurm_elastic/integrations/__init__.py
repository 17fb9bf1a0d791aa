"""Training frameworks, one module each: it imports its framework, and is imported by the user's script alone."""
