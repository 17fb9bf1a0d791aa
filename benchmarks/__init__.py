"""What the project promises in numbers, measured. Each module's own text says how to run it."""
