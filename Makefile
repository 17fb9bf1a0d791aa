# slurm_elastic: every target does the set-up it needs by itself. Root on Debian 12, except for demo and docs.

PYTHON := /opt/slurm-elastic/venv/bin/python

.PHONY: help setup demo test test-all lint bench docs shell

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## Debian packages, Python environment, ordinary user, this package
	@.ci/setup

demo: ## train on four nodes of a real cluster, lose one on the way, and say what happened
	@python3 .ci/demo

lint: setup ## formatting, lint, types, shell scripts
	@.ci/lint

test: lint ## every test, the cluster layer on Slurm 22.05
	@$(PYTHON) -m pytest tests $(PYTEST)

test-all: test ## the cluster layer on Slurm 24.11, too
	@.ci/setup --release 24.11
	@SLURM_ELASTIC_TEST_RELEASE=24.11 $(PYTHON) -m pytest tests/cluster $(PYTEST)

bench: setup ## the benchmarks behind docs/benchmarks.md
	@$(PYTHON) -m benchmarks.rendezvous
	@$(PYTHON) -m benchmarks.recovery
	@$(PYTHON) -m benchmarks.launch

shell: setup ## a shell as an ordinary user of the test cluster
	@python3 -m tests.cluster.testbed shell
