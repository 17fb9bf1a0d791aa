"""The run directory: what the agents of a run share on disk, and the only place that knows file names."""

from slurm_elastic.rundir._errors import RecordError, RunDirError
from slurm_elastic.rundir._run_dir import RunDir, incarnation

__all__ = ["RecordError", "RunDir", "RunDirError", "incarnation"]
