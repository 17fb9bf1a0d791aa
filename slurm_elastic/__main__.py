"""``python -m slurm_elastic`` is ``slurm-elastic``."""

import sys

from slurm_elastic.cli import main

sys.exit(main())
