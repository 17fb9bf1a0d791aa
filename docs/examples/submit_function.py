"""Submit elastic trainings from Python: the cells of a notebook, that also run as a script.

python submit_function.py                on a cluster, from a directory that all nodes share
python submit_function.py --on local     two agents on this machine, no Slurm
python submit_function.py --on debug     in this process, for a debugger
"""

import argparse
import os
from pathlib import Path

import slurm_elastic

EXECUTORS = {
    "slurm": slurm_elastic.ElasticExecutor,
    "local": slurm_elastic.LocalElasticExecutor,
    "debug": slurm_elastic.DebugElasticExecutor,
}


# %% A function that runs in every worker. It is sent as it is, with what it uses of this file; imports lie inside.
def fit(lr: float, epochs: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from slurm_elastic import trainer

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    labels = images[:, :10].argmax(1)
    model = torch.nn.Linear(64, 10)
    epoch = 0

    # A run may start again, on more or fewer nodes: go on from the newest checkpoint.
    checkpoint = Path(os.environ.get("SLURM_ELASTIC_RUN_DIR", "."), "fit.pt")
    if trainer.start_info().resumes and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        epoch = saved["epoch"]

    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr, momentum=0.9)
    while epoch < epochs:
        loss = torch.nn.functional.cross_entropy(parallel(images[rank::world_size]), labels[rank::world_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch += 1
        stop = trainer.should_stop(epoch)
        if stop and rank == 0:
            part = checkpoint.with_suffix(f".{trainer.start_info().round}.part")
            torch.save({"model": model.state_dict(), "epoch": epoch}, part)
            if not trainer.can_publish_checkpoint():
                raise RuntimeError("another group of workers has taken over this run; its checkpoint stays")
            part.replace(checkpoint)
        if stop:
            break

    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    dist.destroy_process_group()
    return {"lr": lr, "epoch": epoch, "accuracy": round(accuracy, 4), "rank": rank, "world_size": world_size}


def main() -> None:
    parser = argparse.ArgumentParser(description="Submit elastic trainings from Python.")
    parser.add_argument("--on", choices=EXECUTORS, default="slurm")
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()

    # %% Two nodes with two workers each. With min_nodes=1 the run would go on with one.
    executor = EXECUTORS[options.on]("runs", min_nodes=2, max_nodes=2, workers_per_node=2)
    executor.update_parameters(timeout_min=10)

    # %% A function: one result of each rank.
    job = executor.submit(fit, 0.5, options.epochs)
    print("job", job.job_id)
    print(job.result())
    print([result["rank"] for result in job.results()])

    # %% A failure arrives with the root cause's traceback.
    wrong = executor.submit(fit, "fast", options.epochs) if options.on != "debug" else None
    print(type(wrong.exception()).__name__ if wrong else "")


if __name__ == "__main__":
    main()
