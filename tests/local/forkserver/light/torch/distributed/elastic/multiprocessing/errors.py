"""The fork server imports this module, and workers that record errors use it."""
