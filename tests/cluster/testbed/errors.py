"""What goes wrong in the test cluster itself."""

from __future__ import annotations


class TestbedError(Exception):
    """The cluster cannot do what was asked; the message is for a person and says how to fix it."""

    # pytest would otherwise take the class for a test because of its name.
    __test__ = False
