"""Finds the statements of a script that change what modules see when they are imported later.

They are found in the source: that a value was put into a module or a class cannot be observed at the next import. An
assignment counts only if its target begins with a name that the file imports: `torch.nn.Linear = Mine` counts, and
`self.layer = ...` does not.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
"""Targets whose assignment is no patch: environment and path are recorded at each import, and modules read the others
when they are used."""


class Effect(NamedTuple):
    """A statement that changes something for modules imported after it."""

    line: int
    function: bool
    """True if the statement is in a function, and executed when that is called."""
    text: str
    kind: str
    """`PATCH`: changes a module or class; `SEED`: seeds random numbers; `STATE`: the recorded state shows it."""


def effects(source: str) -> tuple[tuple[Effect, ...], int | None]:
    """Return the effects in a source, and the first line on which module code calls a function that the file defines.

    A source that Python cannot parse has no effects.
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
    """Return the effects of a file, see `effects`; a file that cannot be read has none."""
    try:
        with open(file, encoding="utf-8", errors="replace") as source:  # noqa: PTH123
            return effects(source.read())
    except OSError:
        return (), None


def fingerprint(found: Sequence[Effect]) -> str:
    """Return a digest of effects: it changes with a file only if the file's effects do."""
    return hashlib.sha256("\n".join(f"{effect.function} {effect.text}" for effect in found).encode()).hexdigest()[:16]


def fingerprint_of(file: str) -> str:
    """Return the fingerprint of a file's effects."""
    return fingerprint(effects_of(file)[0])


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
        kind: The kind of statement to look for.
        files: The effects of the script's own files, and their first calls, as from `effects`.
        executed: The files among them that were imported before.
        file: The file that the import is in.
        line: The line of the import.
        function: The function that the import is in, ``<module>`` for none.
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
