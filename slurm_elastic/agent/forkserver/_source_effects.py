"""The statements of a script that change what modules find when they are imported later.

They are found in the source, not observed: a value put into a module or a class leaves nothing to notice at the next
import. Only what is rooted at a name that the file itself imports counts, `torch.nn.Linear = Mine` and not
`self.layer = ...`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["PATCH", "SEED", "STATE", "Effect", "effect_before", "effects", "effects_of", "fingerprint"]

PATCH, SEED, STATE = "patch", "seed", "state"

_STATE_CALLS = frozenset(
    {
        *("set_default_dtype", "set_default_device", "set_default_tensor_type", "use_deterministic_algorithms"),
        *("set_grad_enabled", "putenv", "unsetenv", "chdir", "addsitedir"),
    }
)
_SEED_CALLS = frozenset({"seed", "manual_seed", "manual_seed_all", "set_seed", "seed_everything", "seed_all"})
_PATCH_CALLS = frozenset({"setattr", "delattr", "patch"})
_SETTINGS = ("torch.backends.", "os.environ", "sys.path", "sys.argv", "sys.stdout", "sys.stderr", "warnings.")
"""Assignments that are no patches: environment and path are observed when a module is imported, and modules read the
others when they are used."""


class Effect(NamedTuple):
    """A statement that changes something for modules imported after it."""

    line: int
    function: bool
    """Whether it stands in a function, and is executed when that is called."""
    text: str
    kind: str
    """`PATCH`: it puts something into a module or class; `SEED`: it seeds random numbers; `STATE`: the recorded state
    shows its effect."""


def effects(source: str) -> tuple[tuple[Effect, ...], int | None]:
    """Find them in a file; also the first line on which the module's own code calls a function that the file defines.

    A file that Python cannot parse has none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return (), None
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found: list[Effect] = []
    calls: list[int] = []
    for node, function in _statements(tree, function=False):
        if isinstance(node, ast.Call) and not function and _root(node.func) in defined:
            calls.append(node.lineno)
        kind = _kind(node, imported)
        if kind is not None:
            found.append(Effect(getattr(node, "lineno", 0), function, ast.unparse(node)[:200], kind))
    return tuple(found), min(calls, default=None)


def effects_of(file: str) -> tuple[tuple[Effect, ...], int | None]:
    """Return the effects of a file, see `effects`; one that cannot be read has none."""
    try:
        with open(file, encoding="utf-8", errors="replace") as source:  # noqa: PTH123
            return effects(source.read())
    except OSError:
        return (), None


def fingerprint(found: Sequence[Effect]) -> str:
    """Return what tells two versions of a file apart as far as its effects go."""
    return hashlib.sha256("\n".join(f"{effect.function} {effect.text}" for effect in found).encode()).hexdigest()[:16]


def effect_before(
    kind: str,
    files: Mapping[str, tuple[tuple[Effect, ...], int | None]],
    executed: Sequence[str],
    file: str,
    line: int,
    function: str,
) -> str | None:
    """Return the statement that may have been executed before an import; None if there is none.

    Args:
        kind: of the statement.
        files: the effects of the script's own files, and their first calls.
        executed: those of them that were imported before.
        file: where the import is.
        line: where in `file`.
        function: the function that it is in, ``<module>`` for none.
    """
    for name in dict.fromkeys((*executed, file)):
        found, first_call = files.get(name, ((), None))
        for effect in found:
            if effect.kind != kind:
                continue
            if name != file:
                before = True
            elif effect.function:
                before = function != "<module>" or (first_call is not None and first_call < line)
            else:
                before = function != "<module>" or effect.line < line
            if before:
                return f"{name}:{effect.line}: {effect.text}"
    return None


def _statements(node: ast.AST, *, function: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, function
        inside = function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _statements(child, function=inside)


def _kind(node: ast.AST, imported: set[str]) -> str | None:
    """Return the kind of effect that a node has; None if it has none."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [element for target in node.targets for element in _elements(target)]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    changed = [
        target for target in targets if isinstance(target, ast.Attribute | ast.Subscript) and _root(target) in imported
    ]
    if changed:
        return STATE if all(ast.unparse(target).startswith(_SETTINGS) for target in changed) else PATCH
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if last in _PATCH_CALLS and (called != last or (node.args and _root(node.args[0]) in {*imported, "patch"})):
            return PATCH
        if last in _SEED_CALLS:
            return SEED
        if called.startswith(("os.environ.", "sys.path.")) or last in _STATE_CALLS:
            return STATE
    return None


def _elements(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
