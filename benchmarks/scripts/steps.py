"""Steps of 50 ms with an all-reduce, the same under every launcher; with the argument `idle` it only sleeps."""

import signal
import sys
import time

import marks

if __name__ == "__main__":
    if sys.argv[1:] == ["idle"]:
        while True:
            signal.pause()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    while True:
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        marks.mark(step=time.time())
