"""An agent that has imported torch together with its fork server, and runs scripts by that and plainly."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT))

from slurm_elastic.agent.forkserver.client import ForkServer  # noqa: E402
from slurm_elastic.agent.forkserver.worker_command import Program, execute_jointly, obstacle_to_sharing  # noqa: E402

ARGUMENTS = ["--lr", "1e-3", ""]


def agent_main(arguments: Sequence[str], fork_server: ForkServer | None, mask: Sequence[int], why: str | None) -> int:
    """Write to results.json what became of each script that the directory `scripts` holds."""
    from tests.local.forkserver.helpers.workplace import Workplace, comparable

    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert fork_server is not None, why
    assert fork_server.program is not None
    place = Workplace.__new__(Workplace)
    place.directory = Path(arguments[0])
    place.script, place.program, place.fork_server = place.directory / "train.py", fork_server.program, fork_server
    place.entrypoint, place.variables = sys.executable, {}
    results = {}
    for script in sorted((place.directory / "scripts").iterdir()):
        place.script.write_text(script.read_text())
        ended = [place.run_warm(ARGUMENTS, {"GIVEN": "x"}), place.run_plain(ARGUMENTS, {"GIVEN": "x"})]
        results[script.stem] = [asdict(comparable(one)) for one in ended]
    (place.directory / "results.json").write_text(json.dumps(results))
    fork_server.close()
    return 5


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "train.py").touch()
    program = Program.script(str(directory / "train.py"), ARGUMENTS)
    assert obstacle_to_sharing(program) is None
    execute_jointly(
        program,
        ["numpy.random"] if find_spec("numpy") else [],
        os.environ,
        imports=None,
        agent_main="tests.local.forkserver.helpers.joint:agent_main",
        arguments=[str(directory)],
        signals=[signal.SIGTERM],
    )
