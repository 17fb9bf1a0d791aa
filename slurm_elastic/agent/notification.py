"""Notifications about a run: a command or a URL gets each of a few events once, from the agent that leads.

`step` decides, and is pure. A thread of its own looks and delivers, so that neither a command that hangs nor a shared
file system holds up the agent.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slurm_elastic.agent.event_log import stamp
from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.job.requeue import read_history
from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.agent.option_values import NotifySettings
from slurm_elastic.control import WorkerProgress
from slurm_elastic.failures.history import Loop, find_loops
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
class Notification:
    """One event of a run.

    Attributes:
        key: Names the event among those of the run, also for agents that lead later.
    """

    event: str
    key: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Watch:
    """The knowledge of an agent about waits. Times are monotonic.

    Attributes:
        idle_since: When no round ran any more, or the agent began; None while a round runs.
        steps: Calls of should_stop of the workers here in that round; None if none reports.
    """

    idle_since: float | None
    round: int | None = None
    steps: int | None = None
    steps_since: float = 0.0
    told: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the run, now."""

    leads: bool
    steps: int | None


def step(
    watch: Watch, event: Entry | Look, incarnation: str, after: float, now: float
) -> tuple[Watch, Notification | None]:
    """Return the next knowledge, and what the user is told now.

    Args:
        incarnation: Of the run; a failure or a wait in another one is another event.
        after: Seconds after which a wait is worth a notification.
    """
    if isinstance(event, Entry):
        return _happened(watch, event, incarnation, now)
    if watch.idle_since is None and event.steps is not None and event.steps != watch.steps:
        watch = replace(watch, steps=event.steps, steps_since=now)
    if not event.leads:
        return watch, None
    if watch.idle_since is not None:
        seconds = now - watch.idle_since
        if seconds < after:
            return watch, None
        last = "none" if watch.round is None else str(watch.round)
        text = f"no round has run for {seconds:.0f} s: the run waits for its minimum of nodes"
        fields: dict[str, object] = {"seconds": round(seconds, 1)}
        return _once(watch, Notification("waiting", f"waiting.{incarnation}.{last}", text, fields))
    seconds = now - watch.steps_since
    if watch.steps is None or seconds < after:
        return watch, None
    text = f"no step for {seconds:.0f} s in round {watch.round}"
    fields = {"round": watch.round, "steps": watch.steps, "seconds": round(seconds, 1)}
    return _once(watch, Notification("no_progress", f"no_progress.{watch.round}.{watch.steps}", text, fields))


def _once(watch: Watch, notification: Notification) -> tuple[Watch, Notification | None]:
    if notification.key in watch.told:
        return watch, None
    return replace(watch, told=watch.told | {notification.key}), notification


def _happened(watch: Watch, entry: Entry, incarnation: str, now: float) -> tuple[Watch, Notification | None]:
    match entry.event:
        case "round_formed":
            number = entry.fields["round"]
            assert isinstance(number, int)
            return replace(watch, idle_since=None, round=number, steps=None, steps_since=now), None
        case "round_ended":
            return (watch if watch.idle_since is not None else replace(watch, idle_since=now)), None
        case "run_ended":
            if entry.fields["outcome"] in ("succeeded", "closed"):
                return watch, Notification("finished", "finished", entry.text, entry.fields)
            return watch, Notification("failed", f"failed.{incarnation}.{watch.round}", entry.text, entry.fields)
    return watch, None


def deliver(
    target: str, run_dir: RunDir, node: str, notification: Notification, limit: float = _DELIVERY_LIMIT
) -> None:
    """Deliver a notification, unless that was tried before, by this agent or another one."""
    record = {
        **stamp(notification.event, node),
        "run": run_dir.run_id,
        "directory": str(run_dir.path),
        "text": notification.text,
        **notification.fields,
    }
    try:
        if not run_dir.claim_notification(notification.key, record):
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

    def __init__(
        self,
        settings: NotifySettings,
        run_dir: RunDir,
        node: str,
        incarnation: str,
        leads: Callable[[], bool],
        loops: Callable[[], Sequence[Loop]] | None = None,
        loop_interval: float = _LOOP_INTERVAL,
    ) -> None:
        self._settings, self._run_dir, self._node = settings, run_dir, node
        self._incarnation, self._leads, self._loop_interval = incarnation, leads, loop_interval
        self._loops = loops or (lambda: find_loops(read_history(run_dir), time.time()))
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
        """See base class."""
        self._running = running
        self.happened(Entry("round_formed", "", {"round": running.assignment.round}))

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        """See base class."""
        self._running = None
        self.happened(Entry("round_ended", ""))

    def close(self) -> None:
        """Deliver what is left, within a few seconds."""
        self._last_by = time.monotonic() + _LAST_LIMIT
        self._events.put(None)
        self._thread.join(_LAST_LIMIT + 1)

    def _live(self) -> None:
        watch, loops_at = Watch(time.monotonic()), time.monotonic() + self._loop_interval
        while True:
            event: Entry | Look | None
            try:
                event = self._events.get(timeout=min(_LOOK, self._settings.after / 4))
            except queue.Empty:
                event = Look(self._leads(), self._steps())
            if event is None:
                return
            watch, notification = step(watch, event, self._incarnation, self._settings.after, time.monotonic())
            if notification is not None:
                self._deliver(notification)
            if isinstance(event, Look) and event.leads and time.monotonic() >= loops_at:
                loops_at = time.monotonic() + self._loop_interval
                self._tell_loops()

    def _tell_loops(self) -> None:
        try:
            loops = self._loops()
        except RunDirError as error:
            logger.warning("the events of the run cannot be read: %s", error)
            return
        for loop in loops:
            if loop.key not in self._told:
                self._told.add(loop.key)
                fields: dict[str, object] = {"loop": loop.loop, "advice": loop.advice, "nodes": list(loop.nodes)}
                self._deliver(Notification("loop", f"loop.{loop.key}", loop.text, fields))

    def _deliver(self, notification: Notification) -> None:
        limit = _DELIVERY_LIMIT if self._last_by is None else max(0.1, self._last_by - time.monotonic())
        deliver(self._settings.target, self._run_dir, self._node, notification, limit)

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
