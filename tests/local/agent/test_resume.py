"""A script whose `--resume PATH` fails without a checkpoint, with the wrapper of docs/howto/resume.md."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from tests.local.agents import Allocation
from tests.local.waiting import eventually

Allocate = Callable[..., Allocation]

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "resume.md"
TIMM = """
import argparse, json, os, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path)
parser.add_argument("--experiment")
parser.add_argument("--resume", default="")
args = parser.parse_args()
start = 0
if args.resume:
    if not os.path.isfile(args.resume):
        raise FileNotFoundError(args.resume)
    start = json.loads(Path(args.resume).read_text())["epoch"] + 1
directory = args.output / args.experiment
directory.mkdir(parents=True, exist_ok=True)
with open("starts", "a") as file:
    file.write(f"{start}\\n")
for epoch in range(start, 4):
    if epoch == 2 and not start:
        Path("pid").write_text(str(os.getpid()))
        time.sleep(600)
    (directory / "tmp.pth.tar").write_text(json.dumps({"epoch": epoch}))
    os.replace(directory / "tmp.pth.tar", directory / "last.pth.tar")
"""
"""In the shape of timm: `--resume` has to exist, and the newest checkpoint is `last.pth.tar`."""


def test_the_wrapper_resumes_what_there_is(allocate: Allocate) -> None:
    nodes = allocate(1)
    wrapper = re.search(r"```python\n(# resume\.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert wrapper is not None
    nodes.touch("resume.py", wrapper[1])
    nodes.touch("train.py", TIMM)
    arguments = ["--output", "output", "--experiment", "run1"]
    agent = nodes.start(1, "--max-restarts=1", script=["resume.py", *arguments])
    pid = nodes.directory / "pid"
    eventually(lambda: pid.exists() and pid.read_text(), nodes.log)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert agent.wait() == 0, nodes.log()
    assert (nodes.directory / "starts").read_text().split() == ["0", "2"]
