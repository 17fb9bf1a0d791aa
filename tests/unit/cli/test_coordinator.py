"""The command line of ``slurm-elastic coordinator``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from slurm_elastic.agent.signals import Notices
from slurm_elastic.cli import main
from slurm_elastic.environment import changed_environment

SCONTROL = """\
case "$*" in
  *" 7") echo "JobId=7 JobName=x" && echo "   JobState=RUNNING Restarts=0 NodeList=n1" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def _place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_environment: None, program: Callable[[str, str], None]
) -> None:
    program("scontrol", SCONTROL)
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    monkeypatch.chdir(tmp_path)
    # This process keeps its own signals, output and log.
    monkeypatch.setattr("slurm_elastic.agent.workers.output.make_output_nonblocking", lambda: None)
    monkeypatch.setattr("slurm_elastic.agent.signals.record_signals", Notices)
    monkeypatch.setattr("slurm_elastic.agent.console_log.configure_logging", lambda node: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mine", "the following arguments are required: --nnodes; see slurm-elastic coordinator --help"),
        (
            "--nnodes 2",
            "no run is named; give the id of its array or the --run-id of its agents, or submit the run by --submit",
        ),
        ("--nnodes 2 --submit", "--submit: name a batch script, as in --submit --array=0-7"),
        ("mine --nnodes 3:2", "--nnodes 3:2: the minimum is above the maximum; write it as in 2:3"),
        ("mine --nnodes 2:3 --node-unit 4 --local-addr ::1", "no round of 2 to 3 nodes is valid"),
        ("mine --nnodes 2 --valid-nodes two", "--valid-nodes 'two' is no list of numbers of nodes; write it as in"),
        ("mine --nnodes 2 --max-restarts some", "--max-restarts 'some' is no number; give 0 or more"),
        ("mine --nnodes 2 --rdzv-conf on_tie", "--rdzv-conf: 'on_tie' is no KEY=VALUE; write it as in"),
        ("mine --nnodes 2 --rdzv-conf on_tie=both", "--rdzv-conf: on_tie=both is neither leader nor none"),
        ("mine --nnodes 2 --grace soon", "--grace 'soon' is no number of seconds; give 0 or more"),
        ("a/b --nnodes 2", "run id 'a/b' is no safe file name"),
        ("mine --nnodes 2", "outside Slurm the address of this machine is unknown; give --local-addr or --interface"),
        ("mine --nnodes 2 --run-dir nowhere --local-addr ::1", "is no directory on this node; give a run directory"),
        ("7 --nnodes 2", "job 7 is no array, and becomes another run when Slurm requeues it; submit it with --run-id"),
        ("8 --nnodes 2", "no job 8 is in the queue, and there is no such run in"),
    ],
)
def test_wrong_usage_is_2_with_one_line(arguments: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    # By its older name, as batch scripts call it.
    assert main(["store", *arguments.split()]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert said[-1].startswith("slurm-elastic: error: ")
    assert message in said[-1]
    assert "Traceback" not in "".join(said)


def test_a_run_that_a_worker_submits_has_the_options_of_its_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str, str], None]
) -> None:
    program("sbatch", f"env >{tmp_path}/seen\necho 12")
    for name, value in {"TORCHELASTIC_RUN_ID": "3", "PET_MAX_RESTARTS": "9", "PET_ROLE": "outer", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    def submit_only(*arguments: object) -> int:
        cast(Callable[[], str], arguments[-1])()
        return 0

    monkeypatch.setattr("slurm_elastic.agent.coordinator.coordinate", submit_only)
    options = ["mine", "--nnodes=2", "--run-dir", str(tmp_path), "--local-addr=127.0.0.1", "--submit", "x.sbatch"]
    with changed_environment(dict.fromkeys(("PET_RDZV_ID", "PET_RUN_DIR", "PET_NNODES"))):
        assert main(["coordinator", *options]) == 0
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert (seen["PET_RDZV_ID"], seen["PET_NNODES"], seen["PET_MAX_RESTARTS"]) == ("mine", "2", "0")
    assert not seen.keys() & {"TORCHELASTIC_RUN_ID", "PET_ROLE", "RANK"}
