"""JSON as values of declared types: the first use of a type, by several threads at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import slurm_elastic
from slurm_elastic import typed_json

_AT_ONCE = """
import sys, threading, types
from slurm_elastic import typed_json
sys.setswitchinterval(1e-6)
source = '''
from __future__ import annotations
import msgspec
class Part(msgspec.Struct):
    number: int
    name: str
class Whole(msgspec.Struct):
    first: Part
    parts: tuple[Part, ...]
    last: Part | None = None
'''
part = {"number": 1, "name": "one"}
found = []
for number in range(300):
    module = sys.modules[f"module{number}"] = types.ModuleType(f"module{number}")
    exec(source, module.__dict__)
    start = threading.Barrier(4)
    def use():
        start.wait()
        found.append(typed_json.convert({"first": part, "parts": [part]}, module.Whole))
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(len(found))
"""


def test_threads_that_use_a_type_first_at_once_get_its_values() -> None:
    """Of 300 types, each by four threads; msgspec.convert ends such a process by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", _AT_ONCE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1200\n"), done.stderr


def test_no_other_module_parses_json() -> None:
    """But those that workers import, in which msgspec would take time."""
    package = Path(slurm_elastic.__file__).parent
    calls = re.compile(r"msgspec\.(convert|json\.(Decoder|decode))|\bjson\.(loads|load|JSONDecoder)\(")
    found = {path.relative_to(package) for path in package.rglob("*.py") if calls.search(path.read_text())}
    found = {path for path in found if not {"forkserver", "control"} & set(path.parts)}
    assert {str(path) for path in found} == {"typed_json.py", "integrations/transformers.py"}


class Part(msgspec.Struct):
    number: int


def test_what_is_not_of_that_type_is_an_error() -> None:
    assert typed_json.decode(b'{"number": 1}', Part) == Part(1)
    assert typed_json.decode("null", Part | None) is None
    with pytest.raises(typed_json.JSONError, match="Expected `int`"):
        typed_json.decode(b'{"number": "1"}', Part)
    with pytest.raises(typed_json.JSONError, match="Expected `int`"):
        typed_json.convert({"number": "1"}, Part)
    for wrong in (b"{", b'{"number":"\xff"}', b"[" * 10000, "\ud800"):
        with pytest.raises(typed_json.JSONError):
            typed_json.decode(wrong, Part)
        with pytest.raises(typed_json.JSONError):
            typed_json.loads(wrong)
