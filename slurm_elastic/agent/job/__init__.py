"""The jobs of a run and their end: notice of it, requeue, nodes in the place of lost ones, the end of the run."""
