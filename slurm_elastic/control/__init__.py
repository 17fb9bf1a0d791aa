"""The private channel between an agent and each of its workers: stop at one step, progress, fence.

The channel is one page of shared memory per worker and round (`shared_page`). The agent uses `agent_side`; the worker
uses :mod:`slurm_elastic.trainer`, over `worker_side`, which needs the standard library only.
"""
