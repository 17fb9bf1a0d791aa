from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.slurm import Reader
from slurm_elastic.slurm.variables import WORKER_VARIABLES, foreign_variables

DIRECTORY = Path(__file__).parents[3] / "sbatch_templates"
STORE = DIRECTORY / "store.sbatch"
BESIDE = (DIRECTORY / "etcd.sbatch", STORE)
"""Jobs beside the run."""

STAND_IN = """\
#!/bin/bash
if [ "${{0##*/}} $1 $2" = "slurm-elastic job-end wait" ]; then {wait}; exit; fi
printf -v call '%s\\x1f' "${{0##*/}}" "$@"
echo "$call" >>'{log}'
{action}
"""


@pytest.fixture(params=sorted(DIRECTORY.glob("*.sbatch")), ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_sbatch_line_is_explained_and_read_and_asks_for_no_number_of_tasks(template: Path) -> None:
    text = template.read_text()
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("#SBATCH"):
            assert re.match(r"# \w", before), f"{line} lacks a comment"
            # Slurm gives no more nodes than tasks, and of --nodes=2-8 with --ntasks-per-node=1 sbatch makes two tasks.
            assert "--ntasks" not in line
    # sbatch stops reading at the first line that is neither comment nor blank (sbatch(1)).
    body = re.split(r"^(?!#|\s*$)", text, maxsplit=1, flags=re.MULTILINE)[1]
    assert "#SBATCH" not in body


class Job:
    """Runs a batch script with stand-ins for srun and the command."""

    def __init__(self, directory: Path, script: Path) -> None:
        self.script = script
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "calls"
        self.directory = directory
        for tool in ("bash", "sleep", "touch", "env"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)

    def stand_in(self, name: str, action: str, wait: str = ":") -> None:
        path = self.bin / name
        path.write_text(STAND_IN.format(log=self.log, action=action, wait=wait))
        path.chmod(0o755)

    def start(
        self, *arguments: str, script: Path | None = None, more: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        environ = {
            **(more or {}),
            "PATH": str(self.bin),
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "5",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURMD_NODENAME": "n1",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_EXACT": "1",
        }
        return subprocess.Popen(
            [shutil.which("bash") or "bash", script or self.script, *arguments],
            cwd=self.directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def adapted(self, empty: str, filled: str) -> Path:
        """A copy of the script with a line of its site block filled in."""
        text = self.script.read_text()
        assert text.count(f"\n{empty}\n") == 1
        script = self.directory / "elastic.sbatch"
        script.write_text(text.replace(f"\n{empty}\n", f"\n{filled}\n"))
        return script

    def environment(self, *arguments: str, **more: str) -> dict[str, str]:
        """Run the script, and return what srun finds in its environment."""
        self.stand_in("srun", "env >seen; exit 0")
        assert self.run(*arguments, more=more) == (0, "")
        return dict(line.split("=", 1) for line in (self.directory / "seen").read_text().splitlines())

    def run(self, *arguments: str, script: Path | None = None, more: dict[str, str] | None = None) -> tuple[int, str]:
        with self.start(*arguments, script=script, more=more) as process:
            try:
                _, complaint = process.communicate(timeout=60)
            finally:
                kill(process)
        return process.returncode, complaint

    def calls(self) -> list[list[str]]:
        # bash writes a line at once, also beside another process.
        return [call.split("\x1f")[:-1] for call in self.log.read_text().split("\n") if call]


def kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(params=sorted(set(DIRECTORY.glob("*.sbatch")) - {*BESIDE}), ids=lambda path: path.stem)
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    """A run; each of its templates."""
    return make_job(tmp_path, request.param)


@pytest.fixture
def store_job(tmp_path: Path) -> Job:
    return make_job(tmp_path, STORE)


def make_job(base: Path, template: Path) -> Job:
    directory = base / "a b"
    directory.mkdir()
    job = Job(directory, template)
    job.stand_in("slurm-elastic", 'exit "$2"')
    job.stand_in("scancel", "exit 0")
    return job


SRUN = ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
SRUN += ["--cpu-bind=none", "--gpu-bind=none", "--export=ALL"]


def test_arguments_reach_the_agents_unchanged(job: Job) -> None:
    job.stand_in("srun", '[ -z "$SLURM_CPUS_PER_TASK$SLURM_EXACT" ]')
    arguments = ["--max-restarts=3", "my train.py", "--text", "a  b", "", "$HOME", "*"]
    assert job.run(*arguments) == (0, "")
    assert job.calls() == [[*SRUN, "slurm-elastic", "agent", *arguments]]


def test_the_site_block_may_give_srun_options(job: Job) -> None:
    script = job.adapted("srun_options=()", 'srun_options=(--container-image="my image")')
    job.stand_in("srun", "exit 3")
    (job.bin / "slurm-elastic").unlink()
    assert job.run("train.py", script=script) == (3, "")
    assert job.calls() == [[*SRUN, "--container-image=my image", "slurm-elastic", "agent", "train.py"]]


CONTAINERS = {
    "apptainer": (
        "container=(apptainer exec --nv --bind /shared --bind /run/munge /shared/slurm_elastic.sif)",
        [],
        ["apptainer", "exec", "--nv", "--bind", "/shared", "--bind", "/run/munge", "/shared/slurm_elastic.sif"],
    ),
    "pyxis": (
        "srun_options=(--container-image=/shared/slurm_elastic.sqsh --container-mounts=/shared:/shared"
        ' --container-workdir="$PWD")',
        [
            "--container-image=/shared/slurm_elastic.sqsh",
            "--container-mounts=/shared:/shared",
            "--container-workdir={cwd}",
        ],
        [],
    ),
    "enroot": (
        "container=(enroot start --conf /shared/enroot.conf --mount /shared:/shared slurm_elastic)",
        [],
        ["enroot", "start", "--conf", "/shared/enroot.conf", "--mount", "/shared:/shared", "slurm_elastic"],
    ),
}
"""Lines of the site block in docs/howto/containers.md, and the words that they add to srun before and after its end."""


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_site_block_may_name_an_image(job: Job, name: str) -> None:
    line, options, command = CONTAINERS[name]
    assert f"\n{line}\n" in (Path(__file__).parents[3] / "docs/howto/containers.md").read_text()
    script = job.adapted(f"{line.partition('(')[0]}()", line)
    job.stand_in("slurm-elastic", 'echo "slurm-elastic 9.9"')
    job.stand_in("srun", 'echo "$SLURM_ELASTIC_BATCH_VERSION" >&2')

    assert job.run("train.py", script=script) == (0, "slurm-elastic 9.9\n")

    words = [word.format(cwd=job.directory) for word in (*options, *command)]
    assert job.calls() == [["slurm-elastic", "--version"], [*SRUN, *words, "slurm-elastic", "agent", "train.py"]]


@pytest.mark.parametrize("status", [1, 75, 137])
def test_the_run_directory_decides_about_a_failure(job: Job, status: int) -> None:
    job.stand_in("srun", f"exit {status}")
    job.stand_in("slurm-elastic", "exit 42")
    assert job.run("train.py", "--x", "a b") == (42, "")
    assert job.calls()[1:] == [["slurm-elastic", "job-end", str(status), "train.py", "--x", "a b"]]


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_that_is_over_ends_the_job_though_srun_waits(job: Job, code: int) -> None:
    job.stand_in("srun", "sleep 600")
    srun_waits = f"until [ -s '{job.log}' ]; do sleep 0.05; done"
    job.stand_in(
        "slurm-elastic", 'exit "$2"', wait=f'[ "$*" = "job-end wait train.py" ] && {{ {srun_waits}; echo {code}; }}'
    )
    with job.start("train.py") as process:
        try:
            assert process.wait(timeout=60) == code
        finally:
            kill(process)
    assert [call[1:] for call in job.calls() if call[0] != "srun"] == ([["job-end", "1", "train.py"]] if code else [])


def test_what_waits_for_the_run_ends_with_srun(job: Job) -> None:
    job.stand_in("srun", "exit 0")
    job.stand_in("slurm-elastic", "exit 9", wait="exec sleep 600")
    # Reads the standard error to its end, which the stand-in holds.
    assert job.run("train.py") == (0, "")


def test_a_missing_package_is_said_in_one_line(job: Job) -> None:
    (job.bin / "slurm-elastic").unlink()
    job.stand_in("srun", "")
    line = "elastic.sbatch: no slurm-elastic on n1; activate its environment in the site block\n"
    assert job.run("train.py") == (2, line)
    assert not job.log.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_a_signal_neither_ends_the_script_nor_reaches_srun(job: Job, number: signal.Signals) -> None:
    go = job.directory / "go"
    os.mkfifo(go)
    # Open for both, a fifo blocks nobody.
    opened = os.open(go, os.O_RDWR)
    job.stand_in(
        "srun", f"trap 'exit 99' TERM USR1 USR2 HUP; echo ready; read -r status <{shlex.quote(str(go))}; exit $status"
    )
    with job.start("train.py") as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            for _ in range(3):
                process.send_signal(number)
            os.write(opened, b"7\n")
            _, complaint = process.communicate(timeout=60)
        finally:
            kill(process)
            os.close(opened)
    assert (process.returncode, complaint) == (7, "")
    # Only `sbatch --signal=B:...` sends these to the script, and then to nobody else.
    passed_on = [call for call in job.calls() if call[0] == "scancel"]
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        assert passed_on
        assert {tuple(call) for call in passed_on} == {("scancel", f"--signal={number.name[3:]}", "5_2")}
    else:
        assert not passed_on
    assert [call[0] for call in job.calls() if call[0] != "scancel"] == ["srun", "slurm-elastic"]


def test_the_exit_code_is_not_lost_to_a_signal_in_the_same_moment(job: Job) -> None:
    job.stand_in("srun", "kill -USR2 $PPID; kill -USR2 $(ps -o ppid= $PPID); exit 42")
    (job.bin / "ps").symlink_to(shutil.which("ps") or "ps")
    for _ in range(20):
        assert job.run("train.py")[0] == 42


def test_agents_know_that_the_script_ends_the_job(job: Job) -> None:
    job.stand_in("srun", 'echo "$SLURM_ELASTIC_VERDICT" >&2')
    assert job.run("train.py")[1].strip() == {"allocation": "1", "array": "array"}[job.script.stem]


def test_nothing_of_an_outer_job_or_run_reaches_srun(job: Job) -> None:
    names = {text.upper() for text in ("rank", "world_size", "master_port", "srun_debug", "pet_max_restarts")}
    names |= {"TORCHELASTIC_TIMER_FILE", "SLURM_STEP_NODELIST", "SLURM_STEPID", "SLURM_SRUN_COMM_PORT"}
    names |= set(WORKER_VARIABLES)
    options = {"SLURM_EXACT"}
    options |= {f"SLURM_{name}" for name in ("MEM_PER_CPU", "GPUS_PER_TASK", "NTASKS_PER_NODE", "CPUS_PER_TASK")}
    kept = {"SLURM_ELASTIC_ETCD_PASSWORD": "a", "SLURM_STEPMGR": "n1", "SLURM_JOB_ID": "7"}
    polluted = {**dict.fromkeys(names | options, "outer"), **kept}
    assert foreign_variables(polluted, Reader.BATCH) == names
    record(job, "JobId=7 JobName=x Restarts=0 BatchFlag=1")
    seen = job.environment("train.py", **polluted, SLURM_RESTART_COUNT="2", SLURM_HET_SIZE="2")
    assert not seen.keys() & (names | options)
    assert not seen.keys() & {"SLURM_RESTART_COUNT", "SLURM_HET_SIZE", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"}
    assert kept.items() <= seen.items()


def test_what_is_the_jobs_own_reaches_srun(job: Job) -> None:
    record(job, "JobId=7 ArrayJobId=5 HetJobId=7 Restarts=2 BatchFlag=1")
    own = {"SLURM_RESTART_COUNT": "2", "SLURM_HET_SIZE": "2", "PET_MAX_RESTARTS": "1"}
    assert {**own, "SLURM_ARRAY_JOB_ID": "5"}.items() <= job.environment("train.py", **own).items()


@pytest.mark.parametrize(
    ("found", "option"),
    [
        ("JOB_GRES=gpu:4 TresPerTask=gres:gpu:1", "--gpus=4"),
        ("JOB_GRES=gpu:3 TresPerTask=cpu=1,gres/gpu=1", "--gpus=3"),
        ("JOB_GRES=gpu:a100:2,mps:50,gpu:v100:1(S:0-1) TresPerSocket=gres/gpu:1", "--gpus=a100:2,v100:1"),
        ("JOB_GRES=gpu:4 TresPerNode=gres/gpu:4", None),
        ("JOB_GRES=gpu:4 TresPerTask=cpu=2", None),
    ],
)
def test_the_one_task_asks_for_all_gpus_of_a_job_with_gpus_by_task(job: Job, found: str, option: str | None) -> None:
    record(job, f"JobId=7 Restarts=0 {found} BatchFlag=1")
    job.stand_in("srun", "exit 0")
    # Of an outer job: what counts is Slurm's record.
    assert job.run("train.py", more={"SLURM_GPUS_PER_TASK": "1"}) == (0, "")
    (call,) = [call for call in job.calls() if call[0] == "srun"]
    assert [word for word in call if word.startswith("--gpus=")] == ([] if option is None else [option])


def test_gpus_by_task_without_an_answer_of_slurm_end_the_job(job: Job) -> None:
    record(job, "")
    job.stand_in("srun", "exit 0")
    status, complaint = job.run("train.py", more={"SLURM_GPUS_PER_TASK": "1"})
    assert (status, complaint.count("\n")) == (2, 1)
    assert "ask for GPUs by --gpus-per-node" in complaint


def record(job: Job, text: str) -> None:
    """Have Slurm answer this about the job, after another element of its array."""
    for tool in ("grep", "cut", "paste"):
        (job.bin / tool).symlink_to(shutil.which(tool) or tool)
    job.stand_in("scontrol", f"echo 'JobId=6 ArrayJobId=6 Restarts=1'; echo '{text}'")


def test_srun_does_not_ignore_what_the_script_ignores(job: Job) -> None:
    job.stand_in("srun", "kill -TERM $$; exit 0")
    assert job.run("train.py")[0] == 128 + signal.SIGTERM


def test_the_coordinator_job_passes_its_options_and_the_job_of_the_run_on(store_job: Job) -> None:
    store_job.stand_in("slurm-elastic", "exit 75")
    script = store_job.adapted("coordinator_options=()", "coordinator_options=(--interface ib0)")
    arguments = ["--nnodes=2:8", "--submit", "--array=0-7", "array.sbatch", "--text", "a  b", "$HOME"]
    assert store_job.run(*arguments, script=script) == (75, "")
    assert store_job.calls() == [["slurm-elastic", "coordinator", "--interface", "ib0", *arguments]]


def test_a_job_beside_the_run_without_the_package_says_so_in_one_line(store_job: Job) -> None:
    (store_job.bin / "slurm-elastic").unlink()
    line = "store.sbatch: no slurm-elastic on n1; activate its environment in the site block\n"
    assert store_job.run("elastic.sbatch") == (2, line)
