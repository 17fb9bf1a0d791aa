"""Imports modules in a process that is to become the fork server, and says what keeps workers from sharing them.

First all are imported, and the process is looked at once. If that finds harm, the next process tries halves of the list
in processes that are forked for it and end, and halves of these: modules that do harm, those that import them, and the
parts of both are left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from slurm_elastic.agent.forkserver._import_record import is_own_file, listen, random_states
from slurm_elastic.agent.forkserver._linux import children, set_parent_death_signal
from slurm_elastic.agent.forkserver._preload import (
    BAD_FORK,
    BrokenPreloadError,
    import_module,
    obstacle_to_forking,
    uncollected,
)
from slurm_elastic.agent.forkserver._script_objects import namespace_of
from slurm_elastic.agent.node.devices import devices_counted

_WORKER_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "WORLD_SIZE"),
        *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Variables that differ from worker to worker (torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13)."""
_READ_BY_RANK = frozenset(
    {"lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", "torchmetrics.utilities.prints"}
)
"""Modules that store the rank of their process at import; see `renew_ranks`."""
_OOM_SCORE = "/proc/self/oom_score_adj"


class ImportTrial:
    """Imports modules.

    Args:
        directories: The entries that Python puts in front of sys.path for the script.
        preload: The modules of --preload, which may be beside the script.
        seeded: The modules that must draw no random numbers.
        progress: Called before each import, of whatever module.
    """

    def __init__(
        self,
        directories: Sequence[str],
        preload: Sequence[str],
        seeded: Collection[str],
        progress: Callable[[], None],
    ) -> None:
        self._directories, self._preload, self._seeded, self._progress = directories, preload, seeded, progress
        self._preloaded: set[str] = set()
        self._event = ""
        self._answer = -1
        """In a process that tries modules: where it writes what harm they do."""
        self.imported: list[str] = []
        """Those that were not imported before, each with what it imports in turn."""
        self.broken: dict[str, BrokenPreloadError] = {}
        """Error by module, of those that cannot be imported; they may fail in workers, too."""
        self.left_out: dict[str, str] = {}
        """Reason by module, of those that `apart` has not imported here."""

    def together(self, modules: Sequence[str]) -> str:
        """Import all, and return what keeps workers from sharing them, for people; empty if nothing does."""
        with self._watched():
            before = self._state()
            for module in modules:
                self._import(module)
            return self._harm(before)

    def apart(self, modules: Sequence[str]) -> str:
        """Try parts of the list in other processes, and import here what does no harm; return as `together`."""
        packages: dict[str, list[str]] = {}
        for module in modules:
            packages.setdefault(module.partition(".")[0], []).append(module)
        with self._watched():
            before = self._state()
            # A package begins to be imported after those that import it, and before its parts.
            self._halve([module for parts in reversed(packages.values()) for module in parts])
            return self._harm(before)

    def _halve(self, modules: Sequence[str]) -> None:
        middle = (len(modules) + 1) // 2
        for half in filter(None, (modules[:middle], modules[middle:])):
            self.left_out |= {part: harm for part in half if (harm := self._harm_of_parent(part))}
            rest = [module for module in half if module not in {*sys.modules, *self.left_out}]
            harm = self._tried_apart(rest) if rest else ""
            if not harm:
                for module in rest:
                    self._import(module)
            elif len(rest) == 1:
                self.left_out[rest[0]] = harm
            else:
                self._halve(rest)

    def _harm_of_parent(self, module: str) -> str:
        while module := module.rpartition(".")[0]:
            if module in self.left_out:
                return self.left_out[module]
        return ""

    def _import(self, module: str) -> None:
        if module not in sys.modules:
            states = random_states() if module in self._seeded else {}
            try:
                import_module(module)
                self.imported.append(module)
            except BrokenPreloadError as error:
                self.broken[module] = error
            now = random_states() if states else {}
            if any(now[name] != states[name] for name in states):
                self._event = "draws random numbers"
            if module in self._preload:
                self._preloaded = {*sys.modules}

    def _tried_apart(self, modules: Sequence[str]) -> str:
        """Return why workers cannot share modules, from their import in a forked process; empty if they can."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            set_parent_death_signal(signal.SIGKILL)
            before, self._answer = self._state(), writer
            for module in modules:
                self._import(module)
            harm = self._harm(before)
            self._end(harm if harm in ("", BAD_FORK.deed) else f"importing it {harm}")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(writer)
        # What a module has started may keep the other end open.
        os.set_blocking(reader, False)
        with open(reader, "rb") as file:  # noqa: PTH123
            harm = (file.read() or b"").decode()
        while orphans := children(os.getpid()):
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        if code == 0:
            return harm
        return f"importing it ends the process ({signal.Signals(-code).name if code < 0 else code})"

    def _end(self, harm: str) -> NoReturn:
        os.write(self._answer, harm[:1000].encode())
        os._exit(0)

    # What an import must not do.

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        main, script = vars(sys.modules["__main__"]), _script_file()
        # Many batch scripts export MASTER_ADDR, and some modules read all variables (fsspec 2026.9, config.py).
        given_to_all = {name: os.environ.pop(name) for name in _WORKER_VARIABLES & os.environ.keys()}
        if script is not None:
            main["__file__"] = script
        path = [*sys.path]
        sys.path[:0] = self._directories
        listen(self._heard)
        try:
            with uncollected(), first_to_be_killed(), devices_counted(), self._reads_noted():
                yield
        finally:
            listen(None)
            sys.path[:] = path
            if script is not None:
                main.pop("__file__", None)
            for name, value in given_to_all.items():
                os.environ.setdefault(name, value)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import":
            self._progress()
            if self._answer >= 0 and arguments[0] in self.left_out:
                self._end(self.left_out[arguments[0]])
        elif event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            self._event = "makes a temporary file"

    @contextlib.contextmanager
    def _reads_noted(self) -> Iterator[None]:
        """Note which variables are read meanwhile that differ from worker to worker."""
        environ: Any = os.environ
        plain: Any = type(environ)

        def get(variables: Any, name: str) -> Any:
            if name in _WORKER_VARIABLES and _importing() not in _READ_BY_RANK:
                self._event = f"reads {name}, which differs from worker to worker"
            return plain.__getitem__(variables, name)

        environ.__class__ = type(plain.__name__, (plain,), {"__getitem__": get})
        try:
            yield
        finally:
            environ.__class__ = plain

    def _state(self) -> dict[str, Any]:
        """Return what imports must not change, by what is said of a module that does."""
        torch: Any = sys.modules["torch"]
        return {
            "changes sys.path": [*sys.path],
            "changes the working directory": os.getcwd(),  # noqa: PTH109
            "changes the handler of a signal": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "changes a default of torch": (
                torch.get_default_dtype(),
                torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(),
            ),
            "descriptors": _descriptors(),
            "modules": {*sys.modules},
        }

    def _harm(self, before: dict[str, Any]) -> str:
        """Return what imports since `before` have done that workers cannot share, for people; empty for nothing."""
        if self._event:
            return self._event
        if obstacle := obstacle_to_forking():
            return obstacle.deed
        if opened := sorted(_descriptors() - before["descriptors"]):
            return f"leaves open {', '.join(opened)}"
        for module in sys.modules.keys() - before["modules"] - self._preloaded:
            file = (namespace_of(sys.modules.get(module)) or {}).get("__file__")
            if type(file) is str and is_own_file(file, self._directories):
                return f"imports {module}, which is beside the script"
        now = self._state()
        changes = (what for what in before if what not in ("descriptors", "modules") and now[what] != before[what])
        return next(changes, "")


def renew_ranks() -> None:
    """In a worker: set the rank in modules that store it at import, and that were imported in the fork server."""
    for name in _READ_BY_RANK & sys.modules.keys():
        module: Any = sys.modules[name]
        if hasattr(module, "_get_rank"):
            # lightning 2.6, fabric/utilities/rank_zero.py
            module.rank_zero_only.rank = module._get_rank() or 0
        elif hasattr(module, "rank_zero_only"):
            # torchmetrics 1.9, utilities/prints.py
            module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


def _importing() -> str:
    """Return the name of the module whose code runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _descriptors() -> set[str]:
    """Return the open files that workers cannot share, as /proc/self/fd names them."""
    paths = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            mode = os.fstat(int(descriptor)).st_mode
            if stat.S_ISREG(mode):
                flags = fcntl.fcntl(int(descriptor), fcntl.F_GETFL)
                shared = flags & os.O_ACCMODE == os.O_RDONLY
            else:
                # Of devices only terminals have a position or a peer.
                shared = stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and not os.isatty(int(descriptor)))
            if not shared:
                paths.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return paths


def _script_file() -> str | None:
    """Return what __file__ of the script will be: modules that find none take their process for an interactive one."""
    if len(sys.orig_argv) > 1 and sys.argv and sys.argv[0] not in ("", "-c", "-m"):
        return sys.argv[0]
    return None


@contextlib.contextmanager
def first_to_be_killed() -> Iterator[None]:
    """Have the kernel kill this process rather than a worker if memory runs out meanwhile (proc_pid_oom_score_adj(5)).

    The score can be lowered again as far as a privileged process has last set it.
    """
    kept = None
    # A container may have it read-only.
    with contextlib.suppress(OSError):
        with open(_OOM_SCORE) as file:  # noqa: PTH123
            kept = file.read()
        _set_oom_score("1000")
    try:
        yield
    finally:
        if kept is not None:
            with contextlib.suppress(OSError):
                _set_oom_score(kept)


def _set_oom_score(score: str) -> None:
    with open(_OOM_SCORE, "w") as file:  # noqa: PTH123
        file.write(score)
