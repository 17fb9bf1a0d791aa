"""Spack's recipe: spack repo add docs/packaging/spack; spack install py-slurm-elastic."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PySlurmElastic(PythonPackage):
    """Elastic PyTorch training on Slurm: jobs that grow, shrink, survive preemption and come back by themselves."""

    pypi = "slurm_elastic/slurm_elastic-0.2.0.tar.gz"

    license("BSD-3-Clause")

    # `make package` prints the checksum of a release; without one: spack install --no-checksum.
    version("0.2.0")

    variant("completion", default=True, description="Completion of the command in shells")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-torch@2.11: +distributed")
        depends_on("py-submitit@1.5.4:")
        depends_on("py-cloudpickle@3.1:")
        depends_on("py-python-hostlist@2.3.0:")
        depends_on("py-etcd3@0.12.0:")
        depends_on("py-blake3@1.0:")
        depends_on("py-msgspec@0.18:")
        depends_on("py-prometheus-client@0.20:")
        depends_on("py-rich@13:")
        depends_on("py-shtab@1.7:", when="+completion")
