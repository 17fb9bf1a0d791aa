"""Imports in a replacement of the fork server what workers have imported, and checks what each import leaves behind.

Each module is imported in the state (environment, sys.path, torch's defaults) in which the script imported it. The
process is checked after every module, also after those that another one imports, so that as few as possible are left
out. Where a process has imported the same plan before and nothing was left, it is checked after each step of the plan
alone: that finds as much, and says less of where it comes from.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slurm_elastic.agent.devices import cuda_is_open, driver_asked
from slurm_elastic.agent.forkserver._import_plan import ImportPlan, ImportStep
from slurm_elastic.agent.forkserver._preload import (
    DEFERRED,
    BrokenPreloadError,
    import_module,
    torch_says,
    uncollected,
)
from slurm_elastic.agent.forkserver._thread_origins import threads, unknown_threads
from slurm_elastic.environment import changed_environment, set_variable

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
_TEMPORARY = ("mkstemp", "mkdtemp", "NamedTemporaryFile")
"""The functions of `tempfile` that make a file that stays; one without a name stays open."""
_LONGEST_PAUSE = 0.5
_PAUSES = 1
"""The pause, as a multiple of the time that this process has waited for a CPU since the last one."""
_SHARE_OF_MEMORY = 0.5
"""The part of the free memory that imports may take: the rest is for workers."""


class SpoiledError(Exception):
    """The process cannot become the fork server: workers forked from it would share what an import has left."""

    def __init__(self, plan: ImportPlan) -> None:
        super().__init__()
        self.plan = plan
        """The plan for the next replacement."""


class ImportReplay:
    """Imports a plan.

    Args:
        plan: The modules to import.
        before: The state that differences in the plan are based on, see `_import_recorder.current_state`.
        about_to: Called with each step's number before the step, so that the parent knows at which one this process
            was killed.
        imported: Called after each module, also after those that another one imports.
        low_priority: Whether to pause while other processes wait for the CPU.
        check_modules: Whether to check the process after each module; otherwise after each step of the plan, and
            nothing is left out of the plan of a `SpoiledError` if that check fails.
    """

    def __init__(
        self,
        plan: ImportPlan,
        before: Mapping[str, Any],
        about_to: Callable[[int], None],
        imported: Callable[[], None] = lambda: None,
        *,
        low_priority: bool,
        check_modules: bool = True,
    ) -> None:
        self._plan, self._before, self._about_to, self._imported = plan, before, about_to, imported
        self._check_modules = check_modules
        self._tree: list[_Node] = []
        self._culprit: tuple[list[_Node], str] | None = None
        self._threads = threads()
        self._open: list[str] = []
        self._descriptors = _descriptors()
        self._waited, self._low_priority, self._yields = _run_delay(), low_priority, False
        self._reads: set[str] = set()
        self._temporary = False
        self.broken: dict[str, str] = {}
        """Error by module, of those that cannot be imported; they may fail in workers, too."""

    def run(self) -> None:
        """Import the whole plan; an import that fails is noted in `broken` and leaves what it would leave in a worker.

        Raises:
            SpoiledError: An import has left something that workers cannot share.
        """
        with uncollected(), self._watched(), _limited_memory():
            for number, step in enumerate(self._plan.steps):
                self._about_to(number)
                # Nearly every script makes torch import these, soon after its start.
                self._yields = self._low_priority and step.module not in DEFERRED
                self._import(step)

    def _import(self, step: ImportStep) -> None:
        root = _Node(step.module)
        self._tree = [root]
        random = _random_states()
        change = json.loads(step.state)
        variables = dict(os.environ)
        with _changed(self._before, change):
            path = [*sys.path]
            try:
                import_module(step.module)
            except BrokenPreloadError as error:
                self.broken[step.module] = str(error)
            changed_path = path != sys.path
        if step.module in DEFERRED:
            # A script may never import these. torch._dynamo sets TORCHINDUCTOR_CACHE_DIR, and so does its first use
            # (torch/_inductor/runtime/cache_dir_utils.py, 2.13).
            for name in {*variables, *os.environ}:
                if os.environ.get(name) != variables.get(name):
                    set_variable(name, variables.get(name))
        # Workers get seeds of their own, so random numbers matter only after the script has set a seed.
        if self._culprit is None and change.get("seeded") and _random_states() != {**_random_states(), **random}:
            self._culprit = [root], "draws random numbers"
        if self._culprit is None and changed_path:
            self._culprit = [root], "changes sys.path"
        if self._culprit is not None:
            raise SpoiledError(_without(self._plan, step, root, *self._culprit))
        if not self._check_modules and self._left_behind() is not None:
            raise SpoiledError(self._plan)

    # Checks of every module.

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        main, script = vars(sys.modules["__main__"]), _script_file()
        # Many batch scripts export MASTER_ADDR, and some modules read all variables (fsspec 2026.9, config.py).
        given_to_all = {name: os.environ.pop(name) for name in _WORKER_VARIABLES & os.environ.keys()}
        finder, tempfile = _WatchingFinder(self._watched_execution), vars(importlib.import_module("tempfile"))
        makers = {name: tempfile[name] for name in _TEMPORARY}
        tempfile.update((name, self._noting_temporary(make)) for name, make in makers.items())
        sys.meta_path.insert(0, finder)
        if script is not None:
            main["__file__"] = script
        try:
            with driver_asked(), _reads_noted(self._reads):
                yield
        finally:
            sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]
            tempfile.update(makers)
            if script is not None:
                main.pop("__file__", None)
            for name, value in given_to_all.items():
                os.environ.setdefault(name, value)
            self._forget_devices()

    @contextlib.contextmanager
    def _watched_execution(self, name: str) -> Iterator[None]:
        """Check the process after the code of a module has run."""
        node = _Node(name)
        if self._tree:
            self._tree[-1].children.append(node)
        self._tree.append(node)
        self._yield()
        reads, temporary = set(self._reads), self._temporary
        self._temporary = False
        self._reads.clear()
        try:
            yield
        finally:
            self._check(node)
            self._reads.clear()
            self._reads.update(reads)
            self._temporary = temporary
            self._tree.pop()
            self._imported()

    def _noting_temporary(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def note(*arguments: Any, **options: Any) -> Any:
            self._temporary = True
            return make(*arguments, **options)

        return note

    def _forget_devices(self) -> None:
        # Workers may be given other devices than this process sees (torch/cuda/__init__.py, device_count, 2.13).
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and getattr(cuda, "_cached_device_count", None) is not None:
            vars(cuda)["_cached_device_count"] = None

    def _check(self, node: _Node) -> None:
        if self._culprit is None:
            reason = self._worker_dependence(node) or (self._left_behind() if self._check_modules else None)
            if reason is not None:
                self._culprit = [*self._tree], reason

    def _worker_dependence(self, node: _Node) -> str | None:
        """Return how the import of a module depends on the worker or its files, for people; None if it does not."""
        if self._temporary:
            return "makes a temporary file"
        if self._reads and node.name not in _READ_BY_RANK:
            return f"reads {', '.join(sorted(self._reads))}, which differs from worker to worker"
        return None

    def _left_behind(self) -> str | None:
        """Return what imports since the last call have left that workers cannot share, for people; None if nothing."""
        # Not only their number: `unknown_threads` may have ended some, and a module may end one and start another.
        now, before = threads(), self._threads
        self._threads = now
        if now - before and (names := unknown_threads()):
            return f"starts a thread ({', '.join(names)})"
        numbers = os.listdir("/proc/self/fd")  # noqa: PTH208
        if numbers != self._open:
            self._open = numbers
            opened = sorted(_descriptors() - self._descriptors)
            if opened:
                return f"leaves open {', '.join(opened)}"
            # The driver does not tell of instances of a GPU (MIG) and may not be there; then torch asks CUDA.
            if cuda_is_open():
                return "initializes CUDA"
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "starts a process"
        if torch_says("is_initialized") or torch_says("_is_in_bad_fork"):
            return "initializes CUDA"
        return None

    def _yield(self) -> None:
        """Sleep, if other processes want the CPU, which the time that this process has waited for it shows."""
        if self._yields:
            delay = _run_delay()
            if delay - self._waited > 0.002:
                time.sleep(min(_LONGEST_PAUSE, _PAUSES * (delay - self._waited)))
                delay = _run_delay()
            self._waited = delay


class _Node:
    """A module, and the modules that its import has imported."""

    __slots__ = ("children", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: list[_Node] = []


def _without(plan: ImportPlan, step: ImportStep, root: _Node, tree: Sequence[_Node], reason: str) -> ImportPlan:
    """Return the plan without the last module of `tree` and all that import it, but with what else those import."""
    culprit = tree[-1].name
    ancestors = {node.name: f"importing {culprit} {reason}" for node in reversed(tree)}
    left_out = {**plan.left_out, **ancestors}
    kept: list[str] = []

    def keep(node: _Node) -> None:
        for child in node.children:
            inside = any(child.name == name or child.name.startswith(f"{name}.") for name in ancestors)
            if child.name in ancestors or inside:
                keep(child)
            else:
                kept.append(child.name)

    keep(root)
    steps: list[ImportStep] = []
    for other in plan.steps:
        if other is step:
            steps.extend(ImportStep(name, step.state) for name in dict.fromkeys(kept) if name not in left_out)
        elif other.module not in left_out and not any(other.module.startswith(f"{name}.") for name in ancestors):
            steps.append(other)
        else:
            left_out.setdefault(other.module, ancestors[culprit])
    return ImportPlan(tuple(steps), left_out)


class _WatchingFinder:
    """A finder before all others, whose modules run within a context manager (docs.python.org, importlib).

    Args:
        context: Called with the name of each module, before its code runs.
    """

    def __init__(self, context: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self._context = context

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        for finder in [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]:
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                # Old loaders lack exec_module, and packages without __init__.py run nothing.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _WatchingLoader(spec.loader, self._context)
                return spec
        return None


class _WatchingLoader:
    """Stands for a loader until the code of its module runs."""

    def __init__(self, loader: Any, context: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self._loader, self._context = loader, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        with self._context(module.__spec__.name):
            self._loader.exec_module(module)


@contextlib.contextmanager
def _reads_noted(reads: set[str]) -> Iterator[None]:
    """Note in `reads` which variables are read meanwhile that differ from worker to worker."""
    environ: Any = os.environ
    plain: Any = type(environ)

    def get(self: Any, name: str) -> Any:
        if name in _WORKER_VARIABLES:
            reads.add(name)
        return plain.__getitem__(self, name)

    environ.__class__ = type(plain.__name__, (plain,), {"__getitem__": get})
    try:
        yield
    finally:
        environ.__class__ = plain


@contextlib.contextmanager
def _changed(before: Mapping[str, Any], change: Mapping[str, Any]) -> Iterator[None]:
    """Put this process into the state in which a worker has imported a module, and back.

    What the import itself changes stays, as in the worker.
    """
    torch: Any = sys.modules.get("torch")
    wanted: Mapping[str, str | None] = change.get("environment", {})
    path, directory = [*sys.path], os.getcwd()  # noqa: PTH109
    dtype = torch.get_default_dtype() if torch is not None else None
    sys.path[:] = change.get("path", before["path"])
    if "directory" in change:
        os.chdir(change["directory"])
    if torch is not None and "dtype" in change:
        torch.set_default_dtype(getattr(torch, change["dtype"].rpartition(".")[2]))
    try:
        with changed_environment(wanted):
            yield
    finally:
        sys.path[:] = path
        os.chdir(directory)
        if torch is not None:
            torch.set_default_dtype(dtype)


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


def _descriptors() -> set[str]:
    """Return the open files that workers cannot share, as /proc/self/fd names them."""
    found = set()
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
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return found


def _random_states() -> dict[str, Any]:
    """Return the states of the generators that modules share."""
    states: dict[str, Any] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy.random" in sys.modules and hasattr(sys.modules["numpy.random"], "get_state"):
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = name, keys.tobytes(), *rest
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "get_rng_state"):
        states["torch"] = bytes(sys.modules["torch"].get_rng_state().tolist())
    return states


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


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
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
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo", "rb") as file:  # noqa: PTH123
            line = next(line for line in file if line.startswith(b"MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
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
                        found.append(free + _statistic(f"{root}{group}/memory.stat", cache))
                    group = group.rpartition("/")[0]
    return max(0, min(found)) if found else None


def _number_in(path: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return int(file.read())


def _statistic(path: str, name: str) -> int:
    with open(path) as file:  # noqa: PTH123
        return next((int(value) for key, value in map(str.split, file) if key == name), 0)
