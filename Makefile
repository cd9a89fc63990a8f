# make setup      third-party packages into the cache folder, a light .venv here (seconds when cached)
# make demo       cluster, images, operator, pipeline, one spoken answer
# make test       unit, API server and end-to-end tests
# make test-long  what takes minutes, and larger repetitions
# make lint       ruff, mypy --strict, layers
# make bench      benchmarks; JSON files into benchmarks/out

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.ready
RUN := $(VENV)/bin/python
OMNI := $(VENV)/bin/omni
PYTEST := $(RUN) -m pytest
# Inherited, it would make every process that a test starts compile this project's modules anew.
unexport PYTHONDONTWRITEBYTECODE
# `make test ARGS="-k scale"`
ARGS ?=

.PHONY: help setup cluster api-server simulated-nodes models images loaded demo test test-unit test-apiserver test-e2e test-long lint format bench clean-cluster clean

help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | head -6

# By hand it always looks whether the packages are still there; for the other targets the stamp is enough.
setup:
	@rm -f $(STAMP)
	@$(MAKE) --no-print-directory $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/overrides.txt scripts/setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py
	@touch $@

# What tests wait for is prepared where its progress is seen, and not inside a fixture.

cluster: $(STAMP)
	$(OMNI) cluster up

api-server: $(STAMP)
	$(RUN) -c "from omni_cluster.build import HYPER, ensure_tool; ensure_tool(HYPER)"

simulated-nodes: $(STAMP)
	$(RUN) -c "from omni_cluster.build import KWOK, ensure_tool; ensure_tool(KWOK)"

models: $(STAMP)
	$(OMNI) models prepare

images: models
	$(OMNI) image build all

loaded: cluster models
	$(OMNI) image build all --load

demo: $(STAMP)
	$(OMNI) demo

test: loaded simulated-nodes
	$(PYTEST) tests/unit tests/apiserver tests/e2e -m "not long and not gpu" $(ARGS)

test-unit: $(STAMP)
	$(PYTEST) tests/unit -m "not long and not gpu" $(ARGS)

test-apiserver: api-server
	$(PYTEST) tests/apiserver -m "not long" $(ARGS)

test-e2e: loaded simulated-nodes
	$(PYTEST) tests/e2e -m "not long and not gpu" $(ARGS)

test-long: loaded simulated-nodes
	$(PYTEST) tests -m "long and not gpu" --timeout 1800 $(ARGS)

lint: $(STAMP)
	$(RUN) scripts/lint.py

format: $(STAMP)
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

bench: $(STAMP)
	$(RUN) scripts/bench.py benchmarks/out

clean-cluster: $(STAMP)
	$(OMNI) cluster down

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
