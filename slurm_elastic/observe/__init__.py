"""A run as people and programs outside of it see it: read from its run directory, never changed.

Everything but :mod:`slurm_elastic.observe.find` and :mod:`slurm_elastic.observe.log_lines` is pure: functions over the
records that :mod:`slurm_elastic.observe.records` has read.
"""
