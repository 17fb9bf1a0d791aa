"""Objects that print each look at them, wherever a worker's end, its watch or the fork server might look."""

import os
import sys
import time
import types

import torch


def touched(what):
    os.write(1, f"touched: {what}\n".encode())
    raise RuntimeError("nothing of this is read")


class Proxy:
    def __getattribute__(self, name):
        # Like importlib_metadata's lazy proxies: any attribute, also __class__, imports a module.
        touched(f"{name} of a proxy")


class Metaclass(type):
    def __getattribute__(cls, name):
        touched(f"{name} of a class")

    def __instancecheck__(cls, instance):
        touched("instance check")

    def __subclasscheck__(cls, subclass):
        touched("subclass check")


class Classless(metaclass=Metaclass):
    def __getattribute__(self, name):
        touched(name)

    def __eq__(self, other):
        touched("__eq__")

    def __bool__(self):
        touched("__bool__")

    __hash__ = object.__hash__


class Module(types.ModuleType):
    def __getattribute__(self, name):
        # The interpreter itself asks the modules in sys.modules for these two, when it ends.
        return super().__getattribute__(name) if name in ("__spec__", "__dict__") else touched(f"{name} of a module")


class Key(str):
    __hash__ = str.__hash__

    def __eq__(self, other):
        touched("a key")

    __ne__ = __eq__


proxy, classless, module = Proxy(), object.__new__(Classless), Module("lazy")
for place in (torch, torch.nn.functional, sys):
    vars(place).update(of_the_script_1=proxy, of_the_script_2=classless, of_the_script_3=module)
sys.modules.update(a_proxy=proxy, classless=classless, a_module=module)
globals()[Key("key")] = proxy
torch.of_the_script = touched
cycle = [proxy, classless, module]
cycle.append(cycle)
del cycle
time.sleep(0.3)
print("done", flush=True)
