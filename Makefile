# slurm_elastic: every target does the set-up it needs by itself. Root on Debian 12, except for demo and docs.

PYTHON := /opt/slurm-elastic/venv/bin/python

.PHONY: help setup demo check test test-nightly test-all test-matrix test-containers test-gpu test-strangers simulate soak lint lines package bench docs docs-site pictures screenshots shell

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## Debian packages, Python environment, ordinary user, this package
	@.ci/setup

demo: ## train on three nodes of a real cluster, lose one on the way, get another one, and say what happened
	@python3 .ci/demo

lint: setup ## formatting, lint, types, shell scripts
	@.ci/lint

lines: ## lines of code by package, without comments, docstrings and blanks; LINES=REVISION for another commit
	@.ci/lines $(LINES)

test: setup ## lint, sdist and wheel, and every test, the cluster layer on Slurm 22.05
	@.ci/test $(PYTEST)

test-all: test ## the cluster layer on Slurm 24.11 and 26.05, too
	@.ci/setup --release 24.11
	@SLURM_ELASTIC_TEST_RELEASE=24.11 $(PYTHON) -m pytest tests/cluster $(PYTEST)
	@.ci/setup --release 26.05
	@SLURM_ELASTIC_TEST_RELEASE=26.05 $(PYTHON) -m pytest tests/cluster $(PYTEST)

test-gpu: ## agents on the GPUs of this machine, with the CUDA torch of python3; GPU_PYTHON=/path/to/python make test-gpu
	@$(or $(GPU_PYTHON),python3) -m pytest tests/gpu -s $(PYTEST)

test-containers: setup ## agents in Apptainer images on the test cluster; Apptainer comes from Debian sid
	@.ci/setup --apptainer
	@$(PYTHON) -m pytest tests/containers $(PYTEST)

test-strangers: setup ## scripts in the shape of public ones: as under torchrun, a second start, a kill, a join, a preemption
	@$(PYTHON) -m pytest tests/local/strangers -m "nightly or not nightly" $(PYTEST)

test-nightly: setup ## the tests that take long: frameworks, libraries, growth, fuzzed parsers, no numpy, late files, a million schedules, half an hour of mishaps
	@$(PYTHON) -m pytest tests/local tests/cluster -m nightly $(PYTEST)
	@.ci/apart-python -m pytest tests/local/agent tests/local/rendezvous tests/local/snapshot --late "$$(date +%j)" $(PYTEST)
	@SLURM_ELASTIC_CUTS=10 $(PYTHON) -m pytest tests/cluster/test_partition.py $(PYTEST)
	@SLURM_ELASTIC_FUZZ_SECONDS=10 $(PYTHON) -m pytest tests/unit/test_foreign_bytes.py -q
	@TORCH=any SLURM=22.05 $(PYTHON) -m tests.matrix
	@$(PYTHON) -m tests.simulation --schedules 1000000
	@$(PYTHON) -m tests.cluster.soak --minutes 30

check: setup ## lint, types, unit tests and a thousand simulated schedules, in less than two minutes
	@.ci/check

test-matrix: setup ## the tests with several releases of torch, Python and Slurm; TORCH=2.15.0 PYTHON=3.13 make test-matrix
	@$(PYTHON) -m tests.matrix $(MATRIX)

simulate: setup ## a million simulated schedules on all cores; SIMULATE="--schedules 20000 --first 7"
	@$(PYTHON) -m tests.simulation $(or $(SIMULATE),--schedules 1000000)

# Whoever chooses the mishaps wants these alone.
soak: setup $(if $(SOAK),,simulate) ## that, and mishaps to one run on a real cluster for an hour; SOAK="--mishaps preempt --times 20"
	@$(PYTHON) -m tests.cluster.soak $(SOAK)

package: setup ## sdist and wheel in build/dist, checked, and the demo from the wheel in an empty environment
	@.ci/package $(PACKAGE)

bench: setup ## the benchmarks behind docs/benchmarks.md
	@mkdir -p build
	-@$(PYTHON) -m benchmarks.rendezvous --json build/rendezvous.json
	-@$(PYTHON) -m benchmarks.round_records --json build/round_records.json
	-@$(PYTHON) -m benchmarks.status --json build/status.json
	-@$(PYTHON) -m benchmarks.etcd --json build/etcd.json
	-@$(PYTHON) -m benchmarks.recovery --json build/recovery.json
	-@$(PYTHON) -m benchmarks.failover --json build/failover.json
	-@$(PYTHON) -m benchmarks.launch --json build/launch.json
	-@$(PYTHON) -m benchmarks.frameworks --json build/frameworks.json
	-@$(PYTHON) -m benchmarks.trainer --json build/trainer.json
	-@$(PYTHON) -m benchmarks.snapshot --json build/snapshot.json
	-@$(PYTHON) -m benchmarks.shards --json build/shards.json
	-@$(PYTHON) -m benchmarks.lost_steps --json build/lost_steps.json
	-@$(PYTHON) -m benchmarks.submission --json build/submission.json
	-@$(PYTHON) -m benchmarks.health --json build/health.json
	-@$(PYTHON) -m benchmarks.run_directory --json build/run_directory.json
	@$(MAKE) --no-print-directory docs

docs: ## put what was measured last into docs/benchmarks.md
	@$(PYTHON) -m benchmarks.report build/*.json

pictures: setup ## the pictures of README and of the site, from a run of the demo on a cluster of its own
	@.ci/pictures

docs-site: setup ## the documentation as a site in build/site
	@.ci/docs

screenshots: setup ## pictures of the site in headless Chromium; PAGES="report-1234.html" of other pages
	@.ci/screenshots $(PAGES)

shell: setup ## a shell as an ordinary user of the test cluster
	@python3 -m tests.cluster.testbed shell
