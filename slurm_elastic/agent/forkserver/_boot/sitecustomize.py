"""The entry point of a fork server: Python imports this module in the middle of its own start.

`site` imports a module of this name before the interpreter opens its script (docs.python.org, site). The fork server is
started exactly as a worker is, `python -u train.py ...`, with this directory in front of PYTHONPATH; here it stops,
imports torch, and forks. A forked worker returns from here, and the interpreter goes on to run the script as usual. The
fork server itself never returns from here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

_NAME = "sitecustomize"


def _restore_path(original: str | None) -> str:
    """Remove this directory from sys.path and PYTHONPATH, where the script would see it; return our package's root."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    while here in sys.path:
        sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    return os.path.abspath(os.path.join(here, *[os.pardir] * 4))  # noqa: PTH100, PTH118


def _run_site_customization() -> BaseException | None:
    """Run the installation's own module of this name, which this one hides; return the error that it raises."""
    del sys.modules[_NAME]
    try:
        importlib.import_module(_NAME)
    except Exception as error:
        # `site` passes over the error that there is none, and the import system then forgets this module.
        return error
    return None


def _wait_for_work(settings: dict[str, object], root: str) -> None:
    """Serve the agent; return only in a worker, without our package among its modules."""
    modules_before = set(sys.modules)
    sys.path.insert(0, root)
    from slurm_elastic.agent.forkserver._fast_exit import FastExit

    fast_exit = FastExit()
    from slurm_elastic.agent.forkserver._server import ServerProcess
    from slurm_elastic.agent.forkserver._shared_import import forget_agent, import_and_fork

    sys.path.remove(root)
    if "joint" in settings:
        settings = import_and_fork(settings, modules_before)
    forget_agent(modules_before)
    ServerProcess(settings, fast_exit).serve()


def _main() -> None:
    settings = json.loads(os.environ.pop("SLURM_ELASTIC_WARM"))
    root = _restore_path(settings["pythonpath"])
    raised = _run_site_customization()
    try:
        _wait_for_work(settings, root)
    except BaseException:
        # `site` would only print the error, and Python would run the script in this process.
        sys.excepthook(*sys.exc_info())
        os._exit(70)  # EX_SOFTWARE of sysexits.h
    if raised is not None:
        raise raised


_main()
