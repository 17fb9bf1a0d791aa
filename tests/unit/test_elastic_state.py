"""One object for a training script, in one process without an agent."""

from __future__ import annotations

import difflib
import json
import math
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slurm_elastic import ElasticState, elastic_state, snapshot, trainer
from slurm_elastic.data import ElasticSampler
from slurm_elastic.snapshot import _worker_side

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


class Ended(Exception):  # noqa: N818
    """The worker has ended."""


class Memory:
    """The memory of agents: what is saved in one start is there in the next; `stops` are steps that agents agree on."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.saved: list[int] = []
        self.asked: list[int] = []
        self.stops: set[int] = set()

    def save(self, step: int, **state: object) -> None:
        self.saved.append(step)
        plain = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}
        self.state = json.loads(json.dumps(plain, default=lambda tensor: tensor.tolist()))

    def load(self, **state: object) -> object:
        for name, value in state.items():
            if self.state and hasattr(value, "load_state_dict"):
                content = self.state[name]
                if isinstance(value, nn.Module):
                    content = {key: torch.tensor(item) for key, item in content.items()}  # type: ignore[attr-defined]
                value.load_state_dict(content)
        plain = [name for name, value in state.items() if not hasattr(value, "state_dict")]
        values = tuple(self.state.get(name, state[name]) for name in plain)
        return values if len(values) > 1 else values[0]

    def should_stop(self, step: int) -> bool:
        self.asked.append(step)
        return step in self.stops


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()

    def end() -> None:
        raise Ended

    monkeypatch.setattr(snapshot, "save", memory.save)
    monkeypatch.setattr(snapshot, "load", memory.load)
    monkeypatch.setattr(trainer, "should_stop", memory.should_stop)
    monkeypatch.setattr(elastic_state, "end_worker", end)
    monkeypatch.setattr(elastic_state, "claim", lambda _: None)
    return memory


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(elastic_state, "_claimed", "")
    yield
    _worker_side._forget()


def run(loader_of: str, seed: int = 5) -> tuple[list[tuple[int, list[float], float]], list[int]]:
    """Train; return epoch, samples and a random number of each step, and the epochs that have been finished."""
    torch.manual_seed(seed)
    steps, finished = [], []
    sampler = ElasticSampler(DATA, global_batch_size=4)
    loader: DataLoader[Any] = {
        "sampler": lambda: DataLoader(DATA, batch_sampler=sampler),
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "shuffle": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    }[loader_of]()
    state = ElasticState(sampler=sampler if loader_of == "sampler" else None)
    try:
        for epoch in state.epochs(3):
            for (samples,) in state.batches(loader):
                steps.append((epoch, samples.flatten().tolist(), torch.rand(()).item() + random.random()))
            finished.append(epoch)
    except Ended:
        pass
    return steps, finished


class Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return iter(DATA)


@pytest.mark.parametrize("loader_of", ["sampler", "shuffle", "stream"])
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_after_any_step_repeats_and_leaves_out_none(loader_of: str, stop: int, memory: Memory) -> None:
    undisturbed, finished = run(loader_of)
    memory.__init__()  # type: ignore[misc]
    memory.stops = {stop}
    first, begun = run(loader_of)
    assert len(first) == stop
    memory.stops = set()
    then, rest = run(loader_of, seed=6)
    # With random numbers, and each epoch is finished once; of a stream no one knows which batch is its last.
    assert first + then == undisturbed
    assert begun + rest == finished or loader_of == "stream"
    assert memory.asked == [*range(1, stop + 1), *range(stop + 1, 10)]


def test_a_script_of_its_own_loop_counts_and_finishes_its_epochs(memory: Memory) -> None:
    sampler = ElasticSampler(DATA, global_batch_size=4)
    state = ElasticState(sampler=sampler)
    seen = []
    for epoch in state.epochs(2):
        for samples in sampler:
            seen.append((epoch, len(samples)))
            state.step()
        assert sampler.consumed == len(DATA)
    assert seen == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)]
    assert memory.saved == memory.asked == [1, 2, 3, 4, 5, 6]
    memory.state["elastic"].pop("seed")
    assert memory.state["elastic"] == {"steps": 6, "epoch": 2, "taken": 0, "stopped": False}


def test_a_batch_that_is_left_by_break_counts_and_its_epoch_is_over(memory: Memory) -> None:
    state = ElasticState(sampler=(sampler := ElasticSampler(DATA, global_batch_size=4)))
    for epoch in state.epochs(2):
        for _ in state.batches(DataLoader(DATA, batch_sampler=sampler)):
            if epoch == 0:
                break
    assert memory.asked == [1, 2, 3, 4]


class Training(ElasticState):
    """Declares its values for type checkers."""

    best: float


def test_an_early_stop_ends_both_loops_after_its_step_and_holds_after_a_restart(memory: Memory) -> None:
    for _ in range(2):
        state = Training(best=math.inf)
        for _ in state.epochs(5):
            for (batch,) in state.batches(DataLoader(DATA, batch_size=4)):
                state.best = float(batch.sum())
                if state.steps == 4:
                    state.stop()
        assert (state.steps, state.best) == (4, 6.0)
    assert memory.saved == [1, 2, 3, 4]


def test_a_step_at_which_the_worker_ends_is_saved_though_it_is_not_due(memory: Memory) -> None:
    memory.stops = {5}
    state = ElasticState(snapshot_every=3)
    for _ in range(4):
        state.step()
    with pytest.raises(Ended):
        state.step()
    assert memory.saved == [3, 5]


@pytest.mark.parametrize(("world_size", "skipped"), [(1, 4), (2, 2), (3, 1)])
def test_batches_of_the_group_are_skipped_in_another_world(
    world_size: int, skipped: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for skip in (True, False):
        # Two ranks have taken two batches each.
        memory.state = {"elastic": {"steps": 2, "epoch": 1, "taken": 4, "stopped": False, "seed": 5}}
        left = [*ElasticState().batches(range(12), skip=skip)]
        assert left == [*range(skipped if skip else 0, 12)]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_mean_of_the_ranks_is_that_of_all_samples(
    each: bool, world_size: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = [ElasticSampler(DATA, 4, rank=rank, world_size=world_size) for rank in range(world_size)]
    means = []
    for samples in zip(*samplers, strict=True):
        losses = [DATA.tensors[0][list(own)] for own in samples]
        scaled = [
            ElasticState(sampler=sampler).mean(loss if each else loss.mean())
            for sampler, loss in zip(samplers, losses, strict=True)
        ]
        means.append(torch.stack(scaled).mean().item())
        for sampler in samplers:
            sampler.step()
    # The samples are their own numbers.
    order = torch.tensor([float(index) for step in ElasticSampler(DATA, 4, rank=0, world_size=1) for index in step])
    assert means == pytest.approx([step.mean().item() for step in torch.split(order, 4)])


def test_a_world_that_the_batch_does_not_divide_is_named_unless_the_loss_is_scaled(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    for scales in (True, False):
        memory.state = {}
        sampler = ElasticSampler(DATA, global_batch_size=4, rank=0, world_size=3)
        state = ElasticState(sampler=sampler)
        for _ in state.batches(DataLoader(DATA, batch_sampler=sampler)):
            assert not caplog.messages or not scales
            if scales:
                state.mean(torch.ones(2))
    assert caplog.messages == [
        "step 1 has 4 samples for 3 ranks: call state.mean(loss).backward(), so that each sample counts the same"
    ]


def test_metrics_are_numbers_in_a_file_and_the_loss_is_told_to_the_agent(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(trainer, "report", lambda step, loss: told.append((step, loss)))
    state = ElasticState(checkpoints=tmp_path)
    for _ in state.batches([1, 2]):
        state.report({"rate": 1}, loss=torch.tensor([0.5], requires_grad=True), accuracy=torch.tensor(0.25))
    assert told == [(1, 0.5), (2, 0.5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 2, "epoch": 0, "round": 0, "rate": 1.0, "loss": 0.5, "accuracy": 0.25}
    with pytest.raises(TypeError, match=re.escape("loss is a tensor of shape (2,): report one number")):
        state.report(loss=torch.ones(2))
    with pytest.raises(TypeError, match="best is a str: report a number"):
        state.report({"best": "0.5"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hook": print}, "hook is a builtin_function_or_method; a snapshot holds tensors"),
        ({"progress": {"seen": {1, 2}}}, "progress.seen is a set; a snapshot holds"),
        ({"step": 3}, "ElasticState has a step of its own: give yours another name"),
        ({"per_rank": {}}, "ElasticState has a per_rank of its own"),
        ({"sampler": [1, 2]}, "sampler is a list: give ElasticSampler(data_set, global_batch_size=...), or none"),
        ({"checkpoint_every": "10m"}, "checkpoint_every is a str: give seconds"),
        ({"checkpoint_every_steps": 2.5}, "checkpoint_every_steps is a float: give steps"),
        ({"snapshot_every": 0.5}, "snapshot_every is a float: give steps"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_without_an_agent(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)) as raised:
        ElasticState(model=nn.Linear(1, 1), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_names_and_loaders_that_are_not_those_of_the_state(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ElasticState(sampler=ElasticSampler(DATA, global_batch_size=4))
    with pytest.raises(AttributeError, match=re.escape("ElasticState has no best: give it ElasticState(best=...)")):
        _ = state.best  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=re.escape("no value best to set: give it ElasticState(best=...)")):
        state.best = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="the loader and ElasticState have different samplers"):
        next(state.batches(DataLoader(DATA, batch_size=4)))
    with pytest.raises(TypeError, match="the loader and ElasticState have different samplers"):
        next(ElasticState().batches(DataLoader(DATA, batch_sampler=ElasticSampler(DATA, 4))))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match=re.escape("loader is a Stateful, whose state is that of one rank")):
        ElasticState(loader=Stateful())


class Stateful:
    """A loader that knows its place, as torchdata's."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 6:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_loader_that_knows_its_place_is_state_of_one_rank(memory: Memory) -> None:
    memory.stops, loader = {2}, Stateful()
    with pytest.raises(Ended):
        [*ElasticState(loader=loader).batches(loader)]
    memory.stops = set()
    loader = Stateful()
    assert [*ElasticState(loader=loader).batches(loader)] == [3, 4, 5, 6]


def test_the_samplers_data_set_and_batch_are_named() -> None:
    assert ElasticSampler(DATA, global_batch_size=4).state_dict() == ElasticSampler(10, 4).state_dict()
    with pytest.raises(TypeError, match="ElasticSampler needs global_batch_size=: the samples of a step"):
        ElasticSampler(DATA)
    with pytest.raises(TypeError, match="Stream has no length"):
        ElasticSampler(Stream(), global_batch_size=4)  # type: ignore[arg-type]


def test_one_object_saves_and_stops() -> None:
    ElasticState()
    with pytest.raises(RuntimeError, match="has an ElasticState and gets an ElasticState"):
        ElasticState()
    with pytest.raises(RuntimeError, match="has an ElasticState and gets an ElasticCallback"):
        elastic_state.claim("ElasticCallback")


def test_a_rank_that_is_alone_with_its_object_says_so(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SLURM_ELASTIC_ROUND", "0")
    monkeypatch.setattr(elastic_state, "_MEETING", timedelta(milliseconds=200))
    with pytest.raises(RuntimeError, match=r"rank 0 waits for the ElasticState of the other 1 ranks since 0.2 s: make"):
        ElasticState()


def test_the_elastic_example_has_two_lines_more_than_the_one_for_torchrun() -> None:
    plain, elastic = (
        [line for line in (EXAMPLES / name).read_text().rpartition('"""\n\nimport')[2].splitlines() if line]
        for name in ("ddp.py", "elastic_ddp.py")
    )
    page = (EXAMPLES.parent / "tutorial" / "elastic-script.md").read_text()
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert {line[1:] for line in shown if line[0] == "-"} == set(plain) - set(elastic)
    assert {line[1:] for line in shown if line[0] == "+"} == set(elastic) - set(plain)
    added = changed = 0
    for _, first, last, begin, end in difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes():
        if plain[first:last] != elastic[begin:end]:
            changed += min(last - first, end - begin)
            added += max(0, end - begin - (last - first))
    assert (added, changed) == (2, 7)
