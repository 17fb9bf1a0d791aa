"""Imports modules in a process that is to become the fork server, and says what keeps workers from sharing them.

First all are imported, and the process is looked at once. If that finds harm, the next process tries halves of the list
in processes that are forked for it and end, and halves of these: modules that do harm, those that import them, and the
parts of both are left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from slurm_elastic.agent.forkserver._import_record import is_own_file, listen, random_states
from slurm_elastic.agent.forkserver._linux import children, memory_file, set_parent_death_signal
from slurm_elastic.agent.forkserver._preload import BrokenPreloadError, import_module, torch_says, uncollected
from slurm_elastic.agent.forkserver._script_objects import namespace_of
from slurm_elastic.agent.node.devices import cuda_is_open, devices_counted

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
_JEMALLOC = "jemalloc_bg_thd"
"""The name of a thread that jemalloc starts again in a forked process (background_thread_postfork_child in
src/background_thread.c, 5.3); Arrow has it built in, under pyarrow."""
_THREADS_END = 0.3
"""Seconds for threads to end whose library ends them before a fork."""
_LONGEST_PAUSE = 0.5
PROBE_TIMEOUT = 20.0
"""Seconds for forked processes to compute and communicate."""


class ImportTrial:
    """Imports modules.

    Args:
        directories: The entries that Python puts in front of sys.path for the script.
        preload: The modules of --preload, which may be beside the script.
        seeded: The modules that must draw no random numbers.
        progress: Called after each module.
        low_priority: Whether to pause while other processes wait for the CPU.
    """

    def __init__(
        self,
        directories: Sequence[str],
        preload: Sequence[str],
        seeded: Collection[str],
        progress: Callable[[], None],
        *,
        low_priority: bool,
    ) -> None:
        self._directories, self._preload, self._seeded, self._progress = directories, preload, seeded, progress
        self._low_priority = low_priority
        self._preloaded: set[str] = set()
        self._waited = _run_delay()
        self._event = ""
        self._answer = -1
        """In a process that tries modules: where it writes what harm they do."""
        self.imported: list[str] = []
        """Those that were not imported before, each with what it imports in turn."""
        self.broken: dict[str, str] = {}
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

    def apart(self, modules: Sequence[str], *, probe: bool) -> str:
        """Try parts of the list in other processes, and import here what does no harm; return as `together`.

        Args:
            modules: Their names.
            probe: Whether such a process also tries to fork ones that compute.
        """
        packages: dict[str, list[str]] = {}
        for module in modules:
            packages.setdefault(module.partition(".")[0], []).append(module)
        with self._watched():
            before = self._state()
            # A package begins to be imported after those that import it, and before its parts.
            self._halve([module for parts in reversed(packages.values()) for module in parts], probe=probe)
            return self._harm(before)

    def _halve(self, modules: Sequence[str], *, probe: bool) -> None:
        middle = (len(modules) + 1) // 2
        for half in filter(None, (modules[:middle], modules[middle:])):
            self.left_out |= {part: harm for part in half if (harm := self._harm_of_parent(part))}
            rest = [module for module in half if module not in {*sys.modules, *self.left_out}]
            harm = self._tried_apart(rest, probe=probe) if rest else ""
            if not harm:
                for module in rest:
                    self._import(module)
            elif len(rest) == 1:
                self.left_out[rest[0]] = harm
            else:
                self._halve(rest, probe=probe)

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
                self.broken[module] = str(error)
            now = random_states() if states else {}
            if any(now[name] != states[name] for name in states):
                self._event = "draws random numbers"
            if module in self._preload:
                self._preloaded = {*sys.modules}
            self._progress()

    def _tried_apart(self, modules: Sequence[str], *, probe: bool) -> str:
        """Return why workers cannot share modules, from their import in a forked process; empty if they can."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            set_parent_death_signal(signal.SIGKILL)
            before, self._answer = self._state(), writer
            for module in modules:
                self._import(module)
            harm = self._harm(before)
            self._end(f"importing it {harm}" if harm else (probe_forks(PROBE_TIMEOUT) or "" if probe else ""))
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
            with uncollected(), limited_memory(), devices_counted(), self._reads_noted():
                yield
        finally:
            listen(None)
            sys.path[:] = path
            if script is not None:
                main.pop("__file__", None)
            for name, value in given_to_all.items():
                os.environ.setdefault(name, value)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and self._answer >= 0 and arguments[0] in self.left_out:
            self._end(self.left_out[arguments[0]])
        elif event == "import" and self._low_priority:
            delay = _run_delay()
            if delay - self._waited > 0.002:
                time.sleep(min(_LONGEST_PAUSE, delay - self._waited))
                delay = _run_delay()
            self._waited = delay
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
        if names := lasting_threads():
            return f"starts a thread ({', '.join(names)})"
        if opened := sorted(_descriptors() - before["descriptors"]):
            return f"leaves open {', '.join(opened)}"
        # It has used a device, or asked more than their number.
        if cuda_is_open() or torch_says("is_initialized") or torch_says("_is_in_bad_fork"):
            return "initializes CUDA"
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "starts a process"
        for module in sys.modules.keys() - before["modules"] - self._preloaded:
            file = (namespace_of(sys.modules.get(module)) or {}).get("__file__")
            if type(file) is str and is_own_file(file, self._directories):
                return f"imports {module}, which is beside the script"
        now = self._state()
        changes = (what for what in before if what not in ("descriptors", "modules") and now[what] != before[what])
        return next(changes, "")


def lasting_threads() -> list[str]:
    """Return the names of the threads, beside the first, that a forked process lacks.

    Forks once if there are any: libraries that handle forks end their threads at that moment and start them again where
    they are needed, as OpenBLAS does under numpy and scipy (openblas_fork_handler in driver/others/memory.c, 0.3.30).
    """
    if not (names := _threads()):
        return []
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    end = time.monotonic() + _THREADS_END
    while (names := _threads()) and time.monotonic() < end:
        # The kernel lists a thread a little longer than it lives.
        time.sleep(0.01)
    return names


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        if int(task) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm", errors="replace") as file:  # noqa: PTH123
                names.append(file.read().strip())
    return sorted(name for name in names if name != _JEMALLOC)


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


def _run_delay() -> float:
    """Return the seconds that this process has waited for a processor (/proc/<pid>/schedstat, the second field)."""
    try:
        with open("/proc/self/schedstat", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


_SHARE_OF_MEMORY = 0.5
"""The part of the free memory that imports may take: the rest is for workers."""


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Limit imports to a part of the free memory; allocations beyond it fail in this process and not in a worker."""
    free = _free_memory()
    kept = resource.getrlimit(resource.RLIMIT_DATA)
    if free is not None:
        # RLIMIT_DATA counts private writable memory (getrlimit(2), since Linux 4.7); statm(5) has that in pages.
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            data = int(file.read().split()[5]) * resource.getpagesize()
        limit = data + int(free * _SHARE_OF_MEMORY)
        soft = limit if kept[1] == resource.RLIM_INFINITY else min(limit, kept[1])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, kept)


def _free_memory() -> int | None:
    """Return the free bytes of the machine or of this job's cgroup, whichever is less; None if neither is known."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo", "rb") as file:  # noqa: PTH123
            line = next(line for line in file if line.startswith(b"MemAvailable:"))
        sizes.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup") as file:  # noqa: PTH123
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _number, controllers, group in groups:
            names = controllers.split(",")
            root, limit, used, cache = (
                ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
                if controllers == ""
                else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
            if controllers == "" or "memory" in names:
                # Limits of the groups above hold, too (Slurm sets them for the job, the step and the task).
                while group not in ("", "/"):
                    with contextlib.suppress(OSError, ValueError):
                        free = _number_in(f"{root}{group}/{limit}") - _number_in(f"{root}{group}/{used}")
                        sizes.append(free + _statistic(f"{root}{group}/memory.stat", cache))
                    group = group.rpartition("/")[0]
    return max(0, min(sizes)) if sizes else None


def _number_in(path: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return int(file.read())


def _statistic(path: str, name: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return next((int(value) for key, value in map(str.split, file) if key == name), 0)


_PROCESSES = 2
_BAD_FORK = 3


def probe_forks(timeout: float) -> str | None:
    """Fork processes that compute in parallel and all-reduce a tensor; return the problem, None if there is none.

    Args:
        timeout: Seconds after which the processes are killed.
    """
    meeting = memory_file()
    pids = [_fork(rank, f"/proc/{os.getpid()}/fd/{meeting}", timeout) for rank in range(_PROCESSES)]
    end, trouble = time.monotonic() + timeout, None
    while pids:
        for pid in [*pids]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                trouble = trouble or (None if code == 0 else _described(code))
        if pids and (trouble is not None or time.monotonic() > end):
            trouble = trouble or f"a forked process hangs: it has not reduced a tensor within {timeout:.0f} s"
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    os.close(meeting)
    return trouble


def _fork(rank: int, meeting: str, timeout: float) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            set_parent_death_signal(signal.SIGKILL)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            if torch_says("_is_in_bad_fork"):
                os._exit(_BAD_FORK)
            os._exit(0 if _works(rank, meeting, timeout) else 1)
        except BaseException:
            os._exit(1)
    return pid


def _works(rank: int, meeting: str, timeout: float) -> bool:
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(2)
    square = torch.ones(300, 300)
    if float((square @ square).sum()) != 300.0**3 or float(torch.ones(1 << 17).sum()) != float(1 << 17):
        return False
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        if float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()) != 300.0**3:
            return False
    distributed: Any = sys.modules["torch.distributed"]
    if not distributed.is_gloo_available():
        return True
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(meeting, _PROCESSES)
    group = distributed.ProcessGroupGloo(store, rank, _PROCESSES, timedelta(seconds=timeout))
    tensor = torch.ones(8)
    group.allreduce([tensor]).wait()
    return bool((tensor == _PROCESSES).all())


def _described(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"a forked process ends with {signal.Signals(-code).name}"
    if code == _BAD_FORK:
        # torch marks a child in which CUDA cannot be used any more, also where CUDA was only asked for its devices
        # (torch/csrc/cuda/Module.cpp, poison_fork, 2.13).
        return "CUDA was used, and cannot be used after a fork"
    return "a forked process cannot compute or reduce a tensor"
