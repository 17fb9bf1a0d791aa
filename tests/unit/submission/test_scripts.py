"""The batch scripts of submissions, whole. SLURM_ELASTIC_UPDATE_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic._version import __version__
from slurm_elastic.errors import UsageError
from slurm_elastic.submission.batch_script import TEMPLATES, BatchScript, NodeRange, Shape, read_template
from slurm_elastic.submission.executor import ElasticExecutor

GOLDEN = Path(__file__).with_name("golden")
FOLDER = Path("/shared/runs")

SUBMISSIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "function": (
        {"min_nodes": 2, "max_nodes": 4, "workers_per_node": 8},
        {"timeout_min": 240, "slurm_partition": "low"},
        ("-m", "slurm_elastic.submission.worker", "/shared/runs", "0123456789abcdef"),
    ),
    "script": (
        {"max_nodes": 4, "max_restarts": 3, "agent_arguments": ["--interface=ib0"]},
        {"gpus_per_node": 4, "name": "digits", "comment": "a 'quoted' word"},
        ("train.py", "--lr", "1e-3", "--name", "two words"),
    ),
    "array": (
        {"min_nodes": 2, "max_nodes": 8, "shape": "array"},
        {"cpus_per_task": 16, "mem_gb": 32, "slurm_signal_delay_s": 60},
        ("train.py",),
    ),
    "everything": (
        {},
        {
            "nodes": 4,
            "slurm_setup": ["module load cuda"],
            "slurm_teardown": ["rm -rf scratch"],
            "slurm_srun_args": ["--mem-bind=local", "--comment=a b"],
            "slurm_additional_parameters": {"switches": "1@10:00", "get-user-env": True, "requeue": False},
            "slurm_stderr_to_stdout": True,
            "slurm_exclusive": False,
        },
        ("train.py",),
    ),
}


def _script(name: str, folder: str | Path = FOLDER) -> str:
    constructor, parameters, entry = SUBMISSIONS[name]
    executor = ElasticExecutor(folder, **constructor)
    executor.update_parameters(**parameters)
    return executor.plan(entry).text()


@pytest.mark.parametrize("name", SUBMISSIONS)
@pytest.mark.usefixtures("login_node")
def test_script_is_as_it_was(name: str) -> None:
    template = BatchScript.from_template(TEMPLATES.read(SUBMISSIONS[name][0].get("shape", "allocation")))
    known = {
        str(Path(sys.executable).parent): "BIN",
        __version__: "VERSION",
        # They are the template's, word by word.
        "\n".join(template.site): "SITE BLOCK OF THE TEMPLATE",
        "\n".join(template.body): "REST OF THE TEMPLATE",
    }
    shown = _script(name)
    for text, placeholder in known.items():
        assert text in shown
        shown = shown.replace(text, f"<{placeholder}>")
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("SLURM_ELASTIC_UPDATE_GOLDEN") == "1":
        golden.write_text(shown)
    assert shown == golden.read_text()


@pytest.mark.parametrize("name", SUBMISSIONS)
@pytest.mark.usefixtures("login_node")
def test_bash_and_shellcheck_have_no_complaints(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(_script(name))
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    # SC2317: a function that only a trap calls.
    command = ["shellcheck", "--exclude=SC2317", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == ""


@pytest.mark.usefixtures("login_node")
def test_job_id_in_the_folder() -> None:
    assert "#SBATCH --output=/shared/%j/%j_0_log.out\n" in _script("function", "/shared/%j")
    # An element's own id, %j, is not the array's.
    assert "#SBATCH --output=/shared/%A/%A_%a_log.out\n" in _script("array", "/shared/%j")
    assert " --run-dir=/shared " in _script("function", "/shared/%j")


def test_arguments_reach_the_agents_as_they_are(tmp_path: Path) -> None:
    words = ("--lr=1e-3", "two words", "quo'te", '"', "$HOME", "*", "", "\\", "new\nline")
    script = BatchScript((), arguments=words, body=('printf "%s\\0" "$@"',))
    done = subprocess.run(["bash"], input=script.text(), capture_output=True, text=True, check=True, timeout=60)
    assert tuple(done.stdout.split("\0")[:-1]) == words


def test_teardown_runs_at_the_end_whatever_the_exit_code() -> None:
    script = BatchScript((), teardown=("echo cleaned",), body=("echo trained", "exit 75"))
    done = subprocess.run(["bash"], input=script.text(), capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (75, "trained\ncleaned\n")


TEMPLATE = """\
#!/bin/bash
# comment
#SBATCH -N 2 --partition low   # which
#SBATCH --exclusive
#SBATCH -kJ
# about nothing
srun slurm-elastic agent "$@"
"""


def test_own_template_options_in_every_spelling() -> None:
    script = BatchScript.from_template(TEMPLATE.replace("-kJ", "-J mine"))
    assert script.options == (("nodes", "2"), ("partition", "low"), ("exclusive", None), ("job-name", "mine"))
    assert script.body == ("# about nothing", 'srun slurm-elastic agent "$@"')
    assert script.with_options({}, NodeRange(4, 4), without=("exclusive",)).options == (
        ("nodes", "4"),
        ("partition", "low"),
        ("job-name", "mine"),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import torch\n", "no bash script"),
        ("#!/bin/bash\nsrun slurm-elastic agent train.py\n", 'lacks "\\$@"'),
        (TEMPLATE.replace("low", "'low"), "cannot be read"),
        (TEMPLATE.replace("--exclusive", "exclusive"), "belongs to no option"),
    ],
)
def test_template_that_is_none(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        BatchScript.from_template(text)


def test_srun_options_need_a_site_block() -> None:
    script = BatchScript.from_template(TEMPLATE)
    with pytest.raises(UsageError, match="need the line"):
        BatchScript(script.options, srun_options=("--x",), body=script.body).text()


def test_a_template_for_an_array_says_that_its_elements_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "site.sbatch").write_text(TEMPLATES.read("allocation"))
    assert "\nexport SLURM_ELASTIC_VERDICT=1\n" in read_template(tmp_path / "site.sbatch", Shape.ALLOCATION)
    assert "\nexport SLURM_ELASTIC_VERDICT=array\n" in read_template(tmp_path / "site.sbatch", Shape.ARRAY)
    (tmp_path / "site.sbatch").write_text('srun slurm-elastic agent "$@"')
    with pytest.raises(UsageError, match=r"lacks the line .export SLURM_ELASTIC_VERDICT=array., so that each element"):
        read_template(tmp_path / "site.sbatch", Shape.ARRAY)
