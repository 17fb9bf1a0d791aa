"""A rehearsal: a script runs on this machine as several agents, through mishaps at given steps, and is judged.

`scenario` has the mishaps and their plan, `facts` what was seen, `checks` judges it; all three are pure. `nodes` has
the agents, `files` looks at files that are overwritten in place, `runner` lets the mishaps happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

__all__ = ["fail", "hang", "join", "kill", "leader", "pause", "preempt", "timelimit"]

if TYPE_CHECKING:
    from slurm_elastic.rehearsal.scenario import fail, hang, join, kill, leader, pause, preempt, timelimit
else:
    # pytest imports the plugin in every session.
    __getattr__ = lazy(__name__, dict.fromkeys(__all__, "scenario"))
