"""Checks of a site before the first run: facts that are gathered, and pure functions that judge them.

`facts` has the facts, `checks` and `node_checks` judge them. `gather`, `probe` and `probe_job` act: on this machine, on
a node of the doctor's own job, and on that job.
"""
