"""This node: whether it is healthy, what fails together with it, and its GPUs."""
