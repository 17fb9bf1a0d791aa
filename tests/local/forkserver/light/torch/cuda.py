"""A torch that was built without CUDA."""


def _is_in_bad_fork():
    return False


def is_initialized():
    return False
