"""Trains for two steps in one of the shapes that scripts have, and ends as that shape does, with exit code 1.

    shapes.py SHAPE DIRECTORY

Just before, it writes the time to DIRECTORY/<pid>. It ignores SIGTERM, so that the end of one rank cuts none short.
"""

import atexit
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SHAPE, DIRECTORY = sys.argv[1], Path(sys.argv[2])
DATA = TensorDataset(torch.rand(16, 4))


class Training:
    """As in torch's tutorial on DDP: all in one object."""

    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def fit(self, batches):
        for (batch,) in batches:
            self.optimizer.zero_grad()
            self.model(batch).sum().backward()
            self.optimizer.step()


def layer():
    return torch.nn.Linear(4, 4)


def in_a_local():
    Training(layer()).fit(DataLoader(DATA, batch_size=8))


def in_an_object():
    training = Training(layer())
    training.fit(DataLoader(DATA, batch_size=8))
    dist.destroy_process_group()


def in_a_global():
    global kept
    kept = Training(layer())
    kept.fit(DataLoader(DATA, batch_size=8))
    dist.destroy_process_group()


def never_destroyed():
    global kept
    kept = Training(layer())
    kept.fit(DataLoader(DATA, batch_size=8))


def destroyed_at_exit():
    global kept
    atexit.register(dist.destroy_process_group)
    kept = Training(layer())
    kept.fit(DataLoader(DATA, batch_size=8))


def with_dynamo():
    import torch._dynamo

    training = Training(torch.compile(layer(), backend="eager"))
    training.fit(DataLoader(DATA, batch_size=8))
    dist.destroy_process_group()


def with_spawned_loaders():
    global kept
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    kept = DataLoader(DATA, batch_size=8, **options)
    Training(layer()).fit(kept)
    dist.destroy_process_group()


def with_threads():
    global kept
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    threading.Thread(target=lambda: [torch.rand(100).sum() for _ in range(10_000)]).start()
    kept = Training(layer())
    kept.fit(DataLoader(DATA, batch_size=8))
    dist.destroy_process_group()


def with_work_outstanding():
    global kept
    kept = [dist.all_reduce(torch.rand(1 << 16), async_op=True) for _ in range(4)]


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = layer()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()


def hangs():
    """Tells whether a hang would be seen."""
    atexit.register(time.sleep, 20)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    {name.replace("_", "-"): shape for name, shape in list(globals().items()) if callable(shape)}[SHAPE]()
    (DIRECTORY / str(torch.multiprocessing.current_process().pid)).write_text(repr(time.time()))
    sys.exit(1)
