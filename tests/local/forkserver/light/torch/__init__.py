"""What the fork server uses of torch, for tests that ask nothing about torch: the import of torch takes seconds.

Workplace puts this directory into the module path of the fork server and its workers.
"""

import array
import importlib
import types

importlib.import_module("torch.cuda")
importlib.import_module("torch.nn.parallel")
version = types.SimpleNamespace(cuda=None, hip=None)


class default_generator:  # noqa: N801
    """The generator of random numbers, which has no state."""

    nbytes = 8
    _state = array.array("B", bytes(nbytes))

    @classmethod
    def seed(cls):
        """Seed it anew."""

    @classmethod
    def data_ptr(cls):
        """Return where its state is."""
        return cls._state.buffer_info()[0]


def get_rng_state():
    return default_generator


def initial_seed():
    return 1


def get_default_dtype():
    return float


def is_grad_enabled():
    return True


def are_deterministic_algorithms_enabled():
    return False
