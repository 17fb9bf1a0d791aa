"""The cluster as a person or a test uses it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from . import accounting, config, files, leftovers, machine, network, processes, slurm
from .errors import TestbedError
from .login import Login
from .processes import Process
from .settings import ACCOUNTING, CONTROLLER, NEIGHBOUR, USER, Settings


class Cluster(Login):
    """A cluster that is up: its life, its machines, and what a user does on them (Login)."""

    @classmethod
    def up(cls, settings: Settings) -> Cluster:
        """Bring the cluster up; one that is up with the same settings and healthy is used as it is.

        Whatever an earlier, killed run left under this name is removed first.
        """
        files.check_prerequisites(settings)
        cluster = cls(settings)
        if Settings.load(settings.name) == settings and cluster._is_healthy():
            return cluster
        leftovers.remove(settings)
        try:
            cluster._start()
        except TestbedError as error:
            raise TestbedError(f"{error}\n{files.complaints(settings)}".strip()) from None
        finally:
            # Saved last, so without them the start failed or was interrupted.
            if Settings.load(settings.name) is None:
                leftovers.remove(settings)
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
        files.write(settings)
        network.create_switch(settings)
        if settings.accounting:
            for name in accounting.MACHINES:
                accounting.start_machine(settings, name)
            for words in config.accounts():
                self.command(["sacctmgr", "-i", *words.split()], user="root", machine=ACCOUNTING)
        for name in (CONTROLLER, *settings.node_names):
            machine.start(settings, name, machine.main_program(settings, name))
        for name in (CONTROLLER, *settings.node_names):
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
        try:
            shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root", check=False, timeout=5)
        except TestbedError:
            return False
        states = {line.split()[1] for line in shown.stdout.splitlines()}
        return shown.returncode == 0 and states <= {"idle", "mixed", "allocated", "completing"}

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
        begin = self._begin(machine_name)
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
            self.wait_until("controller does not answer", self._controller_answers, 30)

    def cut(self, machine_name: str) -> None:
        """Pull the machine's network cable: nothing is reset, peers see silence."""
        network.set_cable(self.settings, machine_name, "down")

    def set_apart(self, machine_names: Iterable[str]) -> None:
        """Cut these machines off from all others, but not from each other. One group at a time."""
        network.set_apart(self.settings, machine_names)

    def heal(self, machine_name: str) -> None:
        """Plug the cable in again, where all others have theirs."""
        network.set_cable(self.settings, machine_name, "up")

    @contextmanager
    def closed_ports(self, machine_name: str, toward: str, ports: range) -> Iterator[None]:
        """Connections from one machine to these TCP ports of another one come to nothing; those back do."""
        network.close_ports(self.settings, machine_name, toward, ports)
        try:
            yield
        finally:
            network.set_free(self.settings, machine_name)

    @contextmanager
    def slow_network(self, machine_name: str, toward: str) -> Iterator[None]:
        """What one machine sends to another one takes as on a network that is overloaded."""
        network.slow_down(self.settings, machine_name, toward)
        try:
            yield
        finally:
            network.set_free(self.settings, machine_name)

    def wait_usable(self, node: str, timeout: float = 60.0) -> None:
        """Wait until the node answers and takes jobs; resume it where Slurm holds it DOWN or drained."""

        def usable() -> bool:
            state = self.node_state(node)
            if state.startswith("DOWN") or "DRAIN" in state:
                self.command(["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root", check=False)
            return state.split("+")[0] in ("IDLE", "MIXED", "ALLOCATED") and "DRAIN" not in state

        self.wait_until(f"{node} is not usable", usable, timeout)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until every node is idle and answers."""

        def idle() -> bool:
            shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root", check=False)
            lines = set(shown.stdout.splitlines())
            return lines == {f"{node} idle" for node in self.settings.node_names}

        self.wait_until("nodes are not idle", idle, timeout)

    def cancel_all(self, timeout: float = 30.0) -> None:
        """Cancel every job and kill every process of the ordinary users at once; wait until no job is left."""

        def empty() -> bool:
            # A plain scancel waits KillWait for whoever does not heed SIGTERM.
            for name in self.settings.machines:
                for user in (USER, NEIGHBOUR):
                    processes.kill(self.processes(name, user))
            left = self.command(["squeue", "--noheader", "--all"], user="root").stdout
            if left:
                # Each time: one that is being requeued can be cancelled only when it is pending again.
                for user in (USER, "root"):
                    self.command(["scancel", f"--user={user}"], user="root", check=False)
            return not left

        self.wait_until("jobs do not end", empty, timeout)

    def restore(self) -> None:
        """Undo what a test did: no jobs, every machine running and connected, every node idle."""
        settings = self.settings
        for name in settings.machines:
            running = processes.init_of(settings.namespace(name)) is not None
            if running and network.cable_is_cut(settings, name):
                # Slurm may take half a minute to forgive a silent node, and a moment for a fresh one.
                self.kill(name)
                running = False
            if not running:
                self.start(name)
        self.cancel_all()
        shown = self.command(["sinfo", "-h", "-N", "-o", "%N %T"], user="root").stdout
        for line in sorted(set(shown.splitlines())):
            node, state = line.split()
            if state != "idle":
                self.wait_usable(node)
        self.wait_idle()

    def _begin(self, machine_name: str) -> int:
        """The present second of the clock, when it is later than that in which the machine's last slurmd was started.

        The controller knows a slurmd by the second of its start.
        """
        last = self._slurmd_started(machine_name) if machine_name in self.settings.node_names else 0
        self.wait_until(f"the clock is before the last start of {machine_name}", lambda: int(time.time()) > last)
        return int(time.time())

    def _slurmd_started(self, node: str) -> int:
        """Second of the clock in which the node's slurmd was started that the controller heard last; 0 if of none."""
        environment = {"SLURM_TIME_FORMAT": "%s"}
        try:
            shown = self.command(["scontrol", "show", "node", node], user="root", env=environment, check=False)
        except TestbedError:
            return 0
        fields = slurm.records(shown.stdout)
        started = fields[0].get("SlurmdStartTime", "") if fields else ""
        return int(started) if started.isdigit() else 0

    def _wait_registered(self, node: str, begin: int) -> None:
        """Wait until the controller has heard of the slurmd that was started at `begin` or later.

        Before that it calls the node idle too: on a fresh cluster, and for a while after a node's death.
        """
        self.wait_until(f"{node} does not register", lambda: self._slurmd_started(node) >= begin, 30)

    def _controller_answers(self) -> bool:
        return self.command(["scontrol", "ping"], user="root", check=False).returncode == 0
