"""Notifications about a run: a command or a URL gets each of a few events once, from the agent that leads.

`Watch` decides, without clock or I/O. A thread of its own looks and delivers, so that neither a command that hangs nor
a shared file system holds up the agent.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_elastic.agent.event_log import stamp
from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.job.requeue import read_history
from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.failures.history import find_loops
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir, RunDirError

logger = logging.getLogger("slurm_elastic")

_DELIVERY_LIMIT = 30.0
"""Seconds that a command or URL may take."""
_LAST_LIMIT = 5.0
"""Seconds for which the agent waits at its end for what was not delivered yet."""
_LOOK = 5.0
"""Seconds between two looks at the most."""
_LOOP_INTERVAL = 300.0
"""Seconds between two looks for loops, for which all events of the run are read."""


@dataclass(frozen=True, slots=True)
class Notification(Entry):
    """An event that the user is told; `key` names it among those of the run, also for agents that lead later."""

    key: str = field(kw_only=True)


class Watch:
    """The knowledge of an agent about the waits of a run; a failure or a wait in another incarnation is another event.

    A wait is worth a notification after `after` seconds; `now` is monotonic time.
    """

    def __init__(self, incarnation: str, after: float, now: float) -> None:
        self._incarnation, self._after = incarnation, after
        self._idle_since: float | None = now
        """When no round ran any more, or the agent began; None while a round runs."""
        self._round: int | None = None
        self._steps: int | None = None
        self._steps_since = now

    def happened(self, entry: Entry, now: float) -> Notification | None:
        """Take in an event of the run, and return what the user is told now."""
        match entry.event:
            case "round_formed":
                number = entry.fields["round"]
                assert isinstance(number, int)
                self._idle_since, self._round, self._steps, self._steps_since = None, number, None, now
            case "round_ended" if self._idle_since is None:
                self._idle_since = now
            case "run_ended" if entry.fields["outcome"] in ("succeeded", "closed"):
                return Notification("finished", entry.text, entry.fields, key="finished")
            case "run_ended":
                return Notification("failed", entry.text, entry.fields, key=f"failed.{self._incarnation}.{self._round}")
        return None

    def look(self, leads: bool, steps: int | None, now: float) -> Notification | None:
        """Return what the user is told of a wait, at each look; `steps` are those of workers here, None for none."""
        if self._idle_since is None and steps is not None and steps != self._steps:
            self._steps, self._steps_since = steps, now
        idle = self._idle_since is not None
        seconds = now - (self._steps_since if self._idle_since is None else self._idle_since)
        if not leads or seconds < self._after or not (idle or self._steps is not None):
            return None
        fields: dict[str, object] = {"seconds": round(seconds, 1)}
        if idle:
            last = "none" if self._round is None else str(self._round)
            text = f"no round has run for {seconds:.0f} s: the run waits for its minimum of nodes"
            return Notification("waiting", text, fields, key=f"waiting.{self._incarnation}.{last}")
        text = f"no step for {seconds:.0f} s in round {self._round}"
        fields = {"round": self._round, "steps": self._steps, **fields}
        return Notification("no_progress", text, fields, key=f"no_progress.{self._round}.{self._steps}")


def deliver(target: str, run_dir: RunDir, node: str, notification: Notification, limit: float) -> None:
    """Deliver a notification, unless that was tried before, by this agent or another one."""
    record = {
        **stamp(notification.event, node),
        "run": run_dir.run_id,
        "directory": str(run_dir.path),
        "text": notification.text,
        **notification.fields,
    }
    try:
        if not run_dir.claim_record(record, "notified", notification.key):
            return
        content = json.dumps(record).encode() + b"\n"
        if target.startswith(("http://", "https://")):
            _post(target, content, limit)
        elif problem := run_site_command(target, limit, content=content).problem:
            raise OSError(f"the command {problem}")
    except (RunDirError, OSError, ValueError) as error:
        logger.warning("the notification %r was not delivered: %s", notification.event, error)


class NotifyFeature(Feature):
    """Watches the run, and has its events delivered."""

    def __init__(self, values: OptionValues, run: RendezvousConfig, leads: Callable[[], bool]) -> None:
        self._values, self._run, self._leads = values, run, leads
        self._told: set[str] = set()
        self._events: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._running: RunningRound | None = None
        self._last_by: float | None = None
        self._thread = threading.Thread(target=self._live, name="slurm-elastic-notify", daemon=True)
        self._thread.start()

    def happened(self, entry: Entry) -> None:
        """Note an event of the run. Returns at once; from any thread."""
        self._events.put(entry)

    def workers_started(self, running: RunningRound) -> None:
        self._running = running
        self.happened(Entry("round_formed", "", {"round": running.assignment.round}))

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        self._running = None
        self.happened(Entry("round_ended", ""))

    def close(self) -> None:
        """Deliver what is left, within a few seconds."""
        self._last_by = time.monotonic() + _LAST_LIMIT
        self._events.put(None)
        self._thread.join(_LAST_LIMIT + 1)

    def _live(self) -> None:
        watch = Watch(self._run.incarnation, self._values.notify_after, time.monotonic())
        loops_at = time.monotonic() + _LOOP_INTERVAL
        while True:
            try:
                event = self._events.get(timeout=min(_LOOK, self._values.notify_after / 4))
            except queue.Empty:
                leads = self._leads()
                self._deliver(watch.look(leads, self._steps(), time.monotonic()))
                if leads and time.monotonic() >= loops_at:
                    loops_at = time.monotonic() + _LOOP_INTERVAL
                    self._tell_loops()
                continue
            if event is None:
                return
            self._deliver(watch.happened(event, time.monotonic()))

    def _tell_loops(self) -> None:
        try:
            loops = find_loops(read_history(self._run.run_dir), time.time())
        except RunDirError as error:
            logger.warning("the events of the run cannot be read: %s", error)
            return
        for loop in loops:
            fields: dict[str, object] = {"loop": loop.loop, "advice": loop.advice, "nodes": list(loop.nodes)}
            self._deliver(Notification("loop", loop.text, fields, key=f"loop.{loop.key}"))

    def _deliver(self, notification: Notification | None) -> None:
        if notification is None or notification.key in self._told:
            return
        # The run directory knows as well what was told, and each look would ask it.
        self._told.add(notification.key)
        limit = _DELIVERY_LIMIT if self._last_by is None else max(0.1, self._last_by - time.monotonic())
        deliver(self._values.notify, self._run.run_dir, self._run.node, notification, limit)

    def _steps(self) -> int | None:
        running = self._running
        steps = [worker.boundary for worker in running.progress() if worker.attached] if running is not None else []
        return min(steps, default=None)


def _post(url: str, content: bytes, limit: float) -> None:
    # The import takes a hundredth of a second, and most agents never need it.
    import http.client
    import urllib.request

    request = urllib.request.Request(url, data=content, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit) as answer:
            answer.read(4096)
    except http.client.HTTPException as error:
        raise OSError(f"the server does not speak HTTP: {error!r}") from None
