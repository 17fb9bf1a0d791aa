"""The commands of ``slurm-elastic``. ``resize`` has ``grow`` and ``shrink``, too, and ``template`` has ``example``."""
