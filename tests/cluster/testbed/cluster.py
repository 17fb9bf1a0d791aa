"""The cluster as a person or a test uses it."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from . import accounting, config, leftovers, machine, network, processes, slurm
from .errors import TestbedError
from .processes import Process
from .settings import CONTROLLER, STATE, USER, Settings

_POLL = 0.1
_BOOT_SCRIPT = Path(__file__).with_name("boot.sh")


class Cluster:
    """A cluster that is up.

    A job id is what sbatch printed, or `12_3` for an element of an array. Every wait raises TestbedError
    with Slurm's own view when its time is over.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # Up and down.

    @classmethod
    def up(cls, settings: Settings) -> Cluster:
        """Bring the cluster up; one that is up with the same settings and healthy is used as it is.

        Whatever an earlier, killed run left under this name is removed first.
        """
        _check_prerequisites(settings)
        cluster = cls(settings)
        if Settings.load(settings.name) == settings and cluster._is_healthy():
            return cluster
        leftovers.remove(settings)
        try:
            cluster._start()
        except BaseException:
            if not os.environ.get("SLURM_ELASTIC_TESTBED_KEEP"):
                leftovers.remove(settings)
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The cluster of this name that is up already."""
        settings = Settings.load(name)
        if settings is None:
            raise TestbedError(f"no cluster {name!r} is up: start it with `up --name {name}`")
        return cls(settings)

    def down(self) -> None:
        """End the cluster; nothing of it is left."""
        leftovers.remove(self.settings)

    def _start(self) -> None:
        settings, begin = self.settings, int(time.time())
        _write_state(settings)
        network.create_switch(settings)
        if settings.accounting:
            accounting.start(settings)
        for name in (CONTROLLER, *settings.node_names):
            machine.start(settings, name, machine.main_program(settings, name))
        for name in settings.machines:
            machine.wait_running(settings, name)
        for node in settings.node_names:
            self._wait_registered(node, begin)
        self.wait_idle(timeout=20)
        settings.save()

    def _is_healthy(self) -> bool:
        settings = self.settings
        if any(processes.init_of(settings.namespace(name)) is None for name in settings.machines):
            return False
        if any(network.cable_is_cut(settings, name) for name in settings.machines):
            return False
        shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root", check=False, timeout=5)
        states = {line.split()[1] for line in shown.stdout.splitlines()}
        return shown.returncode == 0 and states <= {"idle", "mixed", "allocated", "completing"}

    # Commands and jobs.

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        machine: str = CONTROLLER,
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60.0,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine and wait for it; `env` adds to an environment that is otherwise fresh."""
        done = subprocess.Popen(
            self._entry(machine, argv, user, cwd, env),
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with done:
            try:
                output, errors = done.communicate(input, timeout=timeout)
            except BaseException as error:
                # nsenter's child goes on when nsenter alone is killed.
                os.killpg(done.pid, 9)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise TestbedError(f"{' '.join(argv)}: no end after {timeout} s") from None
                raise
        if check and done.returncode != 0:
            raise TestbedError(f"{' '.join(argv)}: exit {done.returncode}: {errors.strip() or output.strip()}")
        return subprocess.CompletedProcess(list(argv), done.returncode, output, errors)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        machine: str = CONTROLLER,
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a command on a machine; `options` are those of subprocess.Popen."""
        return subprocess.Popen(self._entry(machine, argv, user, cwd, env), text=True, **options)  # type: ignore[call-overload]

    def submit(
        self, argv: Sequence[str], cwd: str | Path, env: Mapping[str, str] | None = None, user: str = USER
    ) -> int:
        """`sbatch ARGV` in `cwd`; returns the job id."""
        printed = self.command(["sbatch", "--parsable", *argv], cwd=cwd, env=env, user=user).stdout
        return int(printed.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`, for an array the first record."""
        return self.jobs(job_id)[0]

    def jobs(self, job_id: int | str) -> list[dict[str, str]]:
        """One dict of fields for every record that `scontrol show job` prints, for an array its elements."""
        return slurm.records(self.command(["scontrol", "show", "job", str(job_id)], user="root").stdout)

    def wait_for(self, job_id: int | str, states: str | Collection[str], timeout: float = 60.0) -> str:
        """Wait until the job's state is one of `states` and return it.

        Raises:
            TestbedError: the time is over, or the job ended in another state.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (fields := self.job(job_id))["JobState"] not in wanted:
            over = time.monotonic() > deadline
            if over or fields["JobState"] in slurm.FINAL:
                shown = "\n".join(f"  {key}={value}" for key, value in fields.items())
                after = f" after {timeout} s" if over else ""
                raise TestbedError(
                    f"job {job_id} is {fields['JobState']}{after}, not {' or '.join(sorted(wanted))}:\n{shown}"
                )
            time.sleep(_POLL)
        return fields["JobState"]

    def nodes_of(self, job_id: int | str) -> list[str]:
        """The nodes that the job has now, in Slurm's order; empty while it is pending."""
        nodes = self.job(job_id).get("NodeList", "")
        if nodes in ("", "(null)"):
            return []
        return self.command(["scontrol", "show", "hostnames", nodes]).stdout.split()

    def cancel_all(self, timeout: float = 30.0) -> None:
        """Cancel every job at once, without waiting for its KillWait, and wait until none is left."""
        if not self._queue():
            return
        self.command(["scancel", "--signal=KILL", "--partition=low,high"], user="root", check=False)
        self.command(["scancel", f"--user={USER}"], user="root", check=False)
        self.command(["scancel", "--user=root"], user="root", check=False)
        self._wait("jobs do not end", lambda: not self._queue(), timeout)

    # Nodes.

    def node_state(self, node: str) -> str:
        """The node's state as `scontrol show node` prints it, flags included: IDLE, DOWN*, MIXED+DRAIN."""
        return slurm.records(self.command(["scontrol", "show", "node", node], user="root").stdout)[0]["State"]

    def processes(self, node: str, user: str | None = USER) -> list[Process]:
        """The user's processes on the node, orphans too; everybody's if `user` is None."""
        found = processes.of_namespace(self.settings.namespace(node))
        return [process for process in found if user is None or process.user == user]

    def kill(self, machine_name: str) -> None:
        """Power loss: every process of the machine dies at once, peers see their connections reset.

        Cut the machine first for a power loss that peers see as silence.
        """
        machine.kill(self.settings, machine_name)

    def start(self, machine_name: str, *, wait: bool = True) -> None:
        """Bring a killed machine back, cable plugged in, and wait until Slurm can use it."""
        if processes.init_of(self.settings.namespace(machine_name)) is not None:
            raise TestbedError(f"{machine_name} is running")
        begin = int(time.time())
        leftovers.remove_groups(self.settings, machine_name)
        if machine_name in accounting.MACHINES:
            accounting.start_machine(self.settings, machine_name)
        else:
            program = machine.main_program(self.settings, machine_name)
            machine.start(self.settings, machine_name, program)
        machine.wait_running(self.settings, machine_name)
        if wait and machine_name in self.settings.node_names:
            self._wait_registered(machine_name, begin)
            self.wait_usable(machine_name)
        elif wait and machine_name == CONTROLLER:
            self._wait("controller does not answer", self._controller_answers, 30)

    def cut(self, machine_name: str) -> None:
        """Pull the machine's network cable: nothing is reset, peers see silence."""
        network.set_cable(self.settings, machine_name, "down")

    def heal(self, machine_name: str) -> None:
        """Plug the cable in again."""
        network.set_cable(self.settings, machine_name, "up")

    def wait_usable(self, node: str, timeout: float = 60.0) -> None:
        """Wait until the node answers and takes jobs; resume it where Slurm holds it DOWN or drained."""

        def usable() -> bool:
            state = self.node_state(node)
            if state.startswith("DOWN") or "DRAIN" in state:
                self.command(["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root", check=False)
            return state.split("+")[0] in ("IDLE", "MIXED", "ALLOCATED") and "DRAIN" not in state

        self._wait(f"{node} is not usable", usable, timeout)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until every node is idle and answers."""

        def idle() -> bool:
            shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root", check=False)
            lines = set(shown.stdout.splitlines())
            return lines == {f"{node} idle" for node in self.settings.node_names}

        self._wait("nodes are not idle", idle, timeout)

    def restore(self) -> None:
        """Undo what a test did: no jobs, every machine running and connected, every node idle."""
        settings = self.settings
        for name in settings.machines:
            if network.cable_is_cut(settings, name):
                # Slurm may take half a minute to forgive a silent node, and a moment for a fresh one.
                self.heal(name)
                if processes.init_of(settings.namespace(name)) is not None:
                    self.kill(name)
            if processes.init_of(settings.namespace(name)) is None:
                self.start(name)
        self.cancel_all()
        shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root").stdout
        for line in sorted(set(shown.splitlines())):
            node, state = line.split()
            if state != "idle":
                self.wait_usable(node)
        self.wait_idle()

    # Inside.

    def _entry(
        self,
        machine_name: str,
        argv: Sequence[str],
        user: str,
        cwd: str | Path,
        env: Mapping[str, str] | None,
    ) -> list[str]:
        home = pwd.getpwnam(user).pw_dir
        return machine.entry(self.settings, machine_name, argv, user=user, home=home, cwd=cwd, env=env)

    def _queue(self) -> str:
        return self.command(["squeue", "-h", "-a", "-o", "%i %T %N %r"], user="root").stdout.strip()

    def _wait_registered(self, node: str, begin: int) -> None:
        """Wait until the controller has heard of the slurmd that was started at `begin` or later.

        Before that it calls the node idle too: on a fresh cluster, and for a while after a node's death.
        """

        def registered() -> bool:
            shown = self.command(
                ["scontrol", "show", "node", node],
                user="root",
                env={"SLURM_TIME_FORMAT": "%s"},
                check=False,
            )
            fields = slurm.records(shown.stdout)
            started = fields[0].get("SlurmdStartTime", "") if fields else ""
            return started.isdigit() and int(started) >= begin

        self._wait(f"{node} does not register", registered, 30)

    def _controller_answers(self) -> bool:
        return self.command(["scontrol", "ping"], user="root", check=False).returncode == 0

    def _wait(self, complaint: str, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                views = [
                    self.command(argv, user="root", check=False) for argv in (["sinfo", "-N", "-l"], ["squeue", "-a"])
                ]
                shown = "\n".join(view.stdout + view.stderr for view in views)
                log = self.settings.state / "log"
                raise TestbedError(f"{complaint} after {timeout} s (logs in {log}):\n{shown}")
            time.sleep(_POLL)


def _check_prerequisites(settings: Settings) -> None:
    if os.geteuid() != 0:
        raise TestbedError("the test cluster needs root: its nodes are namespaces")
    programs = ["usr/sbin/slurmctld", "usr/sbin/slurmd", "usr/bin/sbatch", "usr/sbin/munged", "usr/bin/tini"]
    missing = [settings.root / program for program in programs if not (settings.root / program).exists()]
    if settings.accounting:
        missing += accounting.missing_programs(settings)
    try:
        pwd.getpwnam(USER)
    except KeyError:
        missing.append(Path(f"user {USER}"))
    if missing:
        setup = "make setup" if settings.release == "22.05" else f".ci/setup --release {settings.release}"
        raise TestbedError(f"missing: {', '.join(map(str, missing))}; run `{setup}` first")


def _write_state(settings: Settings) -> None:
    state = settings.state
    for directory in (STATE, state, state / "log", state / "controller", state / "spool"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.chmod(0o755)
    for node in settings.node_names:
        (state / "spool" / node).mkdir(mode=0o755)
    files = {
        "slurm.conf": config.slurm_conf(settings),
        "gres.conf": config.gres_conf(settings),
        "cgroup.conf": config.cgroup_conf(),
        "hosts": config.hosts(settings),
    }
    for name, text in files.items():
        (state / name).write_text(text)
        (state / name).chmod(0o644)
    shutil.copyfile(_BOOT_SCRIPT, state / "boot.sh")
    key = state / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    for number in range(config.GPUS_PER_NODE):
        # Slurm looks at the device's type alone; this one is /dev/null's.
        os.mknod(state / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
