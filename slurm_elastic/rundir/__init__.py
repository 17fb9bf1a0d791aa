"""The run directory, which the agents of a run share on disk; only this package knows its file names."""

from slurm_elastic.rundir._atomic_files import (
    RecordError,
    RunDirError,
    claim_file,
    list_names,
    publish_file,
    read_file,
    sync_directory,
)
from slurm_elastic.rundir._contents import LogFile, RunContents, RunFile, run_ids
from slurm_elastic.rundir._job_runs import (
    JobRecords,
    KnownRun,
    RunStart,
    choose_run,
    failure_of,
    incarnation_of,
    join_named,
    join_own,
    known_directories,
    remember_directory,
    run_start,
    runs_of_job,
)
from slurm_elastic.rundir._run_dir import RUNS, RunDir, incarnation
from slurm_elastic.rundir._signed_files import is_signature, log_drop, signature
