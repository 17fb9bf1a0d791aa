"""The commands on the pages of the documentation, and the test that runs each of them.

A page is for a site of its own: its job is 1234, its partition has GPUs. A test that runs such a command puts what its
own site has in the place of that, with the same options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_TREES = frozenset({"architecture.md"})
"""Their blocks show which module does what."""

HERE = (
    "slurm-elastic example digits > digits.py",
    "slurm-elastic template allocation > elastic.sbatch",
    "slurm-elastic template array > array.sbatch",
    "slurm-elastic submit --nodes 4 --dry-run train.py",
    "slurm-elastic agent train.py",
    "slurm-elastic list",
    "slurm-elastic status 1234",
    "slurm-elastic logs 1234 --follow",
    "slurm-elastic agent --notify 'mail -s elastic me@example.org' --notify-after 3600 train.py",
    "slurm-elastic agent --notify 'mail -s \"run $SLURM_JOB_ID\" me@example.org' train.py",
    "slurm-elastic agent --nproc-per-node=2 digits.py --epochs=3",
    "slurm-elastic report",
)
"""What tests/local/test_docs_commands.py runs, in this order."""

_NOTIFICATION = "tests/unit/agent/test_notification.py::test_a_url_gets_it_by_post"
_REHEARSE = "tests/local/rehearsal/test_rehearse.py::"
_ETCD = "tests/cluster/test_etcd.py::test_nodes_and_members_of_etcd_are_killed_in_turn"
_SUBMIT = "tests/cluster/test_submission.py::"
_ARRAY = "tests/cluster/test_array.py::"
_LEAVE = "tests/local/agent/test_leave_requests.py::"
_HEALTH = "tests/local/agent/test_health.py::test_it_answers_before_the_first_round_through_a_change_and_to_the_end"
_SHELL = "tests/unit/submission/test_submit_options.py::test_submitted_script_is_the_one_of_the_dry_run"
_DIGITS = "tests/cluster/test_digits.py::test_no_step_is_lost_and_every_sample_comes_once_through_preemptions"

_RESIZE = "tests/cluster/test_grow.py::test_a_run_grows_and_shrinks_without_losing_a_step"
_RESIZE_WORDS = "tests/unit/submission/test_resize.py::test_grow_shrink_and_resize"
_INSTALL = "tests/local/test_docs_commands.py::test_what_the_first_run_installs_can_be_had"
_RESUME = "tests/local/agent/test_resume.py::test_the_wrapper_resumes_what_there_is"

ELSEWHERE = {
    "pip install .": _INSTALL,
    "pip install '.[top]'": _INSTALL,
    "slurm-elastic agent --notify https://chat.example.org/hooks/1234 --notify-after 1800 train.py": _NOTIFICATION,
    "slurm-elastic doctor": "tests/cluster/test_doctor.py::"
    "test_limits_of_slurm_a_small_and_slow_file_system_and_a_controller_that_is_gone_are_found",
    "slurm-elastic doctor --nodes 2 --partition=gpu --gpus-per-node=4": "tests/cluster/test_doctor.py::"
    "test_planted_faults_are_found_and_nothing_else",
    "slurm-elastic drain 1234 node2": f"{_LEAVE}test_drained_nodes_leave_and_the_others_go_on",
    "sbatch --nodes=2-8 elastic.sbatch resume.py --data-dir /data --output output --experiment run1": _RESUME,
    "slurm-elastic list --queued": "tests/unit/cli/test_status.py::test_list_of_queued_jobs_finds_their_directories",
    "sbatch --nodes=2 elastic.sbatch digits.py --epochs 8": _DIGITS,
    "srun --jobid=4711 --overlap --nodelist=n2 --ntasks=1 curl -s 127.0.0.1:37741/status": _HEALTH,
    "srun --jobid=4711 --overlap --nodelist=n2 --ntasks=1 bash -c 'curl -s -H @<(echo \"Authorization: Bearer "
    "$(cat elastic-runs/4711/health-token)\") 127.0.0.1:37741/stacks'": _HEALTH,
    "slurm-elastic doctor --partition=low --checkpoint 41": "tests/cluster/test_doctor.py::"
    "test_planted_faults_are_found_and_nothing_else",
    "slurm-elastic drain 1234 node7": f"{_LEAVE}test_drained_nodes_leave_and_the_others_go_on",
    "slurm-elastic drain 1234 node7 --wait": f"{_LEAVE}test_drained_nodes_leave_and_the_others_go_on",
    "slurm-elastic drain 1234 --all": f"{_LEAVE}test_all_nodes_can_be_drained",
    "slurm-elastic grow 1234 --nodes 2": _RESIZE,
    "sbatch --nodes=4 elastic.sbatch --replace-lost 60 --replace-limit 5 train.py": "tests/cluster/test_replace.py::"
    "test_a_killed_node_is_replaced_and_no_job_is_left",
    "slurm-elastic grow 1234 --nodes 8 --partition=low --time=4:00:00": _RESIZE_WORDS,
    "slurm-elastic shrink 1234 --nodes 2": _RESIZE_WORDS,
    "slurm-elastic resize 1234 6": _RESIZE,
    "slurm-elastic requeue 1234": "tests/cluster/test_preemption.py::"
    "test_a_job_without_batch_script_that_may_not_be_requeued_ends_with_its_last_agent",
    "slurm-elastic rehearse train.py --epochs 1": f"{_REHEARSE}test_the_examples_of_the_documentation_are_right",
    "slurm-elastic rehearse --nodes 4 --mishaps kill,leader,timelimit train.py": f"{_REHEARSE}"
    "test_a_right_script_loses_no_step_that_it_need_not_lose",
    "slurm-elastic rehearse --scenario mishaps.txt --report page.html train.py": f"{_REHEARSE}"
    "test_a_right_script_loses_no_step_that_it_need_not_lose",
    "slurm-elastic submit --nodes 2:4 --gpus-per-node=4 --time=4:00:00 train.py --lr 1e-3": _SHELL,
    "slurm-elastic submit --shape array --nodes 2:8 --partition=low --max-restarts=3 train.py": _SHELL,
    "slurm-elastic top 1234": "tests/local/agent/test_live_status.py::"
    "test_agents_answer_through_the_leader_without_a_health_port",
    "srun slurm-elastic agent --node-check /etc/slurm/health.sh --on-bad-node 'logger -p user.err "
    '"$SLURM_ELASTIC_BAD_NODE_REASON"\' train.py': "tests/cluster/test_bad_nodes.py::"
    "test_a_node_that_fails_its_check_is_excluded_from_the_next_start",
    "sbatch --nodes=2-8 --gpus-per-node=4 elastic.sbatch --max-restarts=3 train.py --lr 1e-3": f"{_SUBMIT}"
    "test_a_job_is_submitted_from_any_directory_with_options_and_arguments_for_each",
    "sbatch --partition=low --array=0-7 --gpus-per-node=4 array.sbatch --nnodes=2:8 --max-restarts=3 train.py": ""
    f"{_ARRAY}test_the_elements_of_an_array_are_one_run_and_do_not_interleave",
    "sbatch --nodes=8 elastic.sbatch --leader-node=node7 train.py": "tests/local/agent/test_rounds.py::"
    "test_the_leader_can_be_on_another_node_than_the_first",
    "sbatch --partition=cpu store.sbatch --nnodes=2:8 --submit --array=0-7 array.sbatch train.py": f"{_ARRAY}"
    "test_a_store_in_a_job_of_its_own_leads_an_array_to_its_end",
    "sbatch --partition=cpu store.sbatch 1234 --nnodes=2:8": f"{_ARRAY}"
    "test_a_store_in_a_job_of_its_own_leads_an_array_to_its_end",
    "sbatch --nodes=2-8 elastic.sbatch --valid-nodes 2,4,8 train.py": "tests/local/agent/test_rounds.py::"
    "test_rounds_have_a_valid_number_of_nodes_and_the_others_are_spares",
    "sbatch --nodes=2-8 elastic.sbatch --node-unit 2 train.py": "tests/local/agent/test_rounds.py::"
    "test_rounds_have_a_valid_number_of_nodes_and_the_others_are_spares",
    "sbatch --nodes=2-8 elastic.sbatch train.py": _ETCD,
    "sbatch elastic.sbatch --rdzv-endpoint=etcd://etcd1:2379,etcd2:2379 train.py": _ETCD,
    "srun --ntasks-per-node=1 torchrun --rdzv-backend=slurm --nnodes=2:4 --nproc-per-node=4 train.py": ""
    "tests/cluster/test_shared_nodes.py::test_torchrun_needs_neither_endpoint_nor_id",
    "srun --ntasks-per-node=1 torchrun --rdzv-backend=slurm --rdzv-endpoint=etcd://etcd1:2379 --nnodes=2:4 train.py": ""
    "tests/cluster/test_shared_nodes.py::test_torchrun_needs_neither_endpoint_nor_id",
    "sbatch --partition=cpu etcd.sbatch --nodes=2-8 elastic.sbatch --max-restarts=3 train.py": "tests/cluster/"
    "test_etcd.py::test_an_etcd_of_its_own_ends_with_the_run",
}
"""The other commands, and the test that runs each with the nodes, partitions and numbers of its own site."""


def shell_commands() -> Iterator[tuple[str, str]]:
    """Yield the page and the words of every command of ours, of sbatch, of srun and of pip."""
    for page in sorted(DOCS.rglob("*.md")):
        if page.name in _TREES:
            continue
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                command = _command(line)
                if command:
                    yield page.name, command


def _command(line: str) -> str:
    """Return a line without prompt and comment if it is such a command; empty if it is none."""
    line = line.removeprefix("$ ")
    first, _, rest = line.partition(" ")
    # What a command of ours says begins with its name and a colon.
    if first not in ("slurm-elastic", "sbatch", "srun", "pip") or rest.split(" ")[0].endswith(":"):
        return ""
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    return " ".join(lexer)
