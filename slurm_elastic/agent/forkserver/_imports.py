"""Imports modules in the fork server, and says what keeps it from being forked, or workers from sharing them.

What workers import is imported by a process that is to become the fork server. First all are imported, and the process
is looked at once. If that finds harm, the next process tries each package, and each module of one that does harm, in
processes that are forked for it and end: modules that do harm, what imports them, and the parts of both are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slurm_elastic.agent.forkserver._fast_exit import namespace_of
from slurm_elastic.agent.forkserver.linux import children, set_parent_death_signal
from slurm_elastic.agent.node.devices import cuda_is_open, devices_counted

REQUIRED = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")
"""Imported before the first worker starts."""
_THREADS_END = 0.3
"""Seconds for threads to end whose library ends them before a fork."""
_JEMALLOC = "jemalloc_bg_thd"
"""The name of a thread that jemalloc starts again in a forked process (background_thread_postfork_child in
src/background_thread.c, 5.3); Arrow has it built in, under pyarrow."""


class BrokenPreloadError(Exception):
    """A module cannot be imported. The message is one line with its name and the error."""

    def __init__(self, module: str, error: BaseException) -> None:
        why = traceback.format_exception_only(type(error), error)[-1].strip()
        super().__init__(f"{module} cannot be imported: {why}")


def import_module(name: str) -> None:
    """Import one module, without collections of garbage: an import keeps nearly all. Raises BrokenPreloadError."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    except BaseException as error:
        raise BrokenPreloadError(name, error) from error
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def import_required() -> str:
    """Import the modules of `REQUIRED`, and return why this process cannot be forked then, for people; empty if it can.

    Raises BrokenPreloadError.
    """
    for name in REQUIRED:
        import_module(name)
    obstacle = obstacle_to_forking()
    return f"importing {REQUIRED[-1]} {obstacle}" if obstacle else ""


def script_directory(options: list[str]) -> list[str]:
    """Return the entries that Python will put in front of sys.path for this program (docs.python.org, sys.path).

    The fork server imports with them, too, so that it finds the same modules as a worker: a script's directory may hold
    modules to preload, or one that hides another.
    """
    if getattr(sys.flags, "safe_path", False):  # Python 3.11
        return []
    target = Path(options[-1])
    if "-c" in options or "-m" in options:
        return [str(Path.cwd())] if "-m" in options else []
    return [str(target.resolve() if target.is_dir() else target.resolve().parent)]


def obstacle_to_forking() -> str:
    """Return why a fork of this process would not work like a fresh interpreter, as what an import has done.

    Empty if it would work. Forks once.
    """
    pid = os.fork()
    if pid == 0:
        # torch marks a child in which CUDA cannot be used any more, also where CUDA was only asked for its devices
        # (torch/csrc/cuda/Module.cpp, poison_fork, 2.13).
        os._exit(1 if torch_says("_is_in_bad_fork") else 0)
    if os.waitpid(pid, 0)[1] != 0 or torch_says("_is_in_bad_fork"):
        return "uses CUDA, which forked processes cannot use then"
    if names := threads_after_fork():
        return f"starts a thread ({', '.join(names)})"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "starts a process"
    # It has used a device, or asked more than their number.
    if cuda_is_open() or torch_says("is_initialized"):
        return "initializes CUDA"
    return ""


def threads_after_fork() -> list[str]:
    """Return the names of the threads, beside the first, that a process forked a moment ago lacks.

    Libraries that handle forks end their threads at that moment and start them again where they are needed, as OpenBLAS
    does under numpy and scipy (openblas_fork_handler in driver/others/memory.c, 0.3.30).
    """
    end = time.monotonic() + _THREADS_END
    while (names := _threads()) and time.monotonic() < end:
        # The kernel lists a thread a little longer than it lives.
        time.sleep(0.001)
    return names


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        if int(task) != os.getpid():
            with contextlib.suppress(OSError):
                names.append(Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip())
    return sorted(name for name in names if name != _JEMALLOC)


def torch_says(question: str) -> bool:
    """Return the answer of a function of torch.cuda; False where that is not imported."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(getattr(cuda, question)())


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


class ImportTrial:
    """Imports modules.

    Args:
        seeded: The modules that must draw no random numbers.
    """

    def __init__(self, directories: Sequence[str], preload: Sequence[str], seeded: Collection[str]) -> None:
        self._directories, self._preload, self._seeded = directories, preload, seeded
        self._preloaded: set[str] = set()
        self._event = ""
        self._answer = -1
        """In a process that tries modules: where it writes what harm they do."""
        self.broken = ""
        """Why a preload cannot be imported, for people. Other modules that cannot be may fail in workers, too."""
        self.left_out: dict[str, str] = {}
        """Reason by module, of those that are not imported here, as they do harm apart."""

    def carry_out(self, modules: Sequence[str], *, apart: bool) -> str:
        """Import modules, and return what keeps workers from sharing them, for people; empty if nothing does.

        Args:
            apart: Try each package in another process first, and import here only what does no harm there.
        """
        with self._watched():
            before = self._state()
            if apart:
                packages: dict[str, list[str]] = {}
                for module in modules:
                    packages.setdefault(module.partition(".")[0], []).append(module)
                # A package begins to be imported after those that import it, and before its parts.
                for parts in reversed(packages.values()):
                    self._try(parts)
            else:
                for module in modules:
                    self._import(module)
            return self._harm(before)

    def _try(self, modules: Sequence[str]) -> None:
        rest = [module for module in modules if module not in sys.modules]
        harm = self._tried_apart(rest) if rest else ""
        if not harm:
            for module in rest:
                self._import(module)
        elif len(rest) == 1:
            self.left_out[rest[0]] = harm
        else:
            for module in rest:
                # A part of a package that does harm does the same, as its import begins with that of the package.
                if harm := self.left_out.get(module.rpartition(".")[0], ""):
                    self.left_out[module] = harm
                else:
                    self._try([module])

    def _import(self, module: str) -> None:
        if module not in sys.modules:
            states = random_states() if module in self._seeded else {}
            try:
                import_module(module)
            except BrokenPreloadError as error:
                if module in self._preload:
                    self.broken = self.broken or str(error)
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
            self._end(f"importing it {harm}" if harm else "")
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
        # Many batch scripts export MASTER_ADDR, and some modules read all variables (fsspec 2026.9, config.py).
        given_to_all = {name: os.environ.pop(name) for name in _WORKER_VARIABLES & os.environ.keys()}
        path = [*sys.path]
        sys.path[:0] = self._directories
        listen(self._heard)
        try:
            with first_to_be_killed(), devices_counted(), self._reads_noted():
                yield
        finally:
            listen(None)
            sys.path[:] = path
            for name, value in given_to_all.items():
                os.environ.setdefault(name, value)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and self._answer >= 0 and arguments[0] in self.left_out:
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
            return obstacle
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


@contextlib.contextmanager
def first_to_be_killed() -> Iterator[None]:
    """Have the kernel kill this process rather than a worker if memory runs out meanwhile (proc_pid_oom_score_adj(5)).

    The score can be lowered again as far as a privileged process has last set it.
    """
    score = Path("/proc/self/oom_score_adj")
    kept = score.read_text()
    # A container may have it read-only.
    with contextlib.suppress(OSError):
        score.write_text("1000")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            score.write_text(kept)


def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


def is_own_file(path: str, directories: Sequence[str]) -> bool:
    """Return whether a file is the script's own: in one of these directories, and not in an installed package."""
    return any(path.startswith(directory + os.sep) for directory in directories) and not is_installed(path)


def random_states() -> dict[str, Any]:
    """Return the states of the generators that modules share."""
    states: dict[str, Any] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy.random" in sys.modules and hasattr(sys.modules["numpy.random"], "get_state"):
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = name, keys.tobytes(), *rest
    if "torch" in sys.modules:
        state = sys.modules["torch"].get_rng_state()
        states["torch"] = ctypes.string_at(state.data_ptr(), state.nbytes)
    return states


Listener = Callable[[str, tuple[Any, ...]], None]
"""Called with the name of an event and its arguments (docs.python.org, Audit events table)."""

_listeners: list[Listener | None] = []


def listen(listener: Listener | None) -> None:
    """Pass audit events to this listener from now on, in place of the one before; None for no listener.

    There is one audit hook, since none can be removed, and processes that are forked inherit it.
    """
    if not _listeners:
        sys.addaudithook(_hook)
    _listeners[:] = [listener]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Called for every `id`, too.
    if _listeners[0] is not None:
        _listeners[0](event, arguments)
