# Everything a person or a pipeline runs. `make help` lists the verbs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
# The folders whose tests start no engine.
FAST_TESTS := $(addprefix tests/,api kube operator gateway agent/test_page.py agent/test_faults.py cli docs gitops runtime/scheduling runtime/storage)
# An environment that forbids bytecode would make every process compile our code again, and every session of pytest the
# tests (20 s of a core); so it is allowed here.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=25 --durations-min=5
UNIT := 'not apiserver and not cluster and not gpu and not kernels'
# They compute and wait for nothing, so `make test` runs them on the cores that other tests leave idle while they wait.
KERNEL_TESTS := tests/runtime/kernels
KERNEL_LOG := build/kernel-tests.log
# Files, not folders: each process of pytest would import all other tests too, for half a minute, and run none of them.
APISERVER_TESTS = $(shell grep -rl 'mark\.apiserver' tests --include='test_*.py' | sort)

# Given as an argument (`make e2e KUBECONFIG=…`), never taken from the environment.
ifneq ($(origin KUBECONFIG),command line)
  override KUBECONFIG :=
endif

.PHONY: help preflight setup bytecode cluster-binary demo test test-unit test-fast test-apiserver test-cluster test-in-order test-kernels-idle kernels check chart-check images-check format generate e2e e2e-containerd e2e-kind chaos docs bench bench-gpu up down clean

help: ## list the verbs
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

preflight: ## say in one sentence each what this machine lacks for the local cluster
	@$(PYTHON) e2e/cluster/preflight.py

setup: $(VENV)/.ready ## create the environment in .venv (about a minute; 3 GB the first time)

NATIVE := $(wildcard runtime/slipway_runtime/kernels/native/*.cpp runtime/slipway_runtime/kernels/native/*.h)

$(VENV)/.ready: pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Slipway needs Python 3.11 or newer; this is %d.%d. Name another with PYTHON=python3.12." % sys.version_info[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Slipway needs Python'\''s venv module (on Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "==> Setting up $(VENV): about a minute, 3 GB of downloads the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --constraint constraints.txt --compile-bytecode --reinstall-package slipway --editable '.[dev]'
	@touch $@

# Pods of the local cluster see the checkout read-only: without this, each one compiles our code when it starts.
bytecode: setup
	@$(BIN)/python -m compileall -q agent api e2e gateway kube operator runtime

cluster-binary: preflight bytecode ## build the local cluster's binary once (about 10 minutes cold, cached outside the tree)
	@$(BIN)/python -m e2e.cluster build

demo: preflight bytecode ## from nothing to streamed tokens, scaling and draining on a real Kubernetes (KEEP=1 leaves it up)
	@$(BIN)/python -m e2e.demo $(if $(KEEP),--keep)

test: preflight setup ## all tests: unit, real API server, short user stories on the local cluster
	@$(MAKE) --no-print-directory -j 2 test-in-order test-kernels-idle

test-in-order:
	@$(MAKE) --no-print-directory test-unit ARGS=--ignore=$(KERNEL_TESTS)
	@$(MAKE) --no-print-directory test-apiserver
	@$(MAKE) --no-print-directory test-cluster

# A test may get no core for minutes here, so each has hours.
test-kernels-idle: bytecode
	@echo "==> The tests of kernels run beside the others at the lowest priority; their output follows at their end"
	@mkdir -p $(dir $(KERNEL_LOG))
	@nice -n 19 env $(PYTEST) -o timeout=7200 -m $(UNIT) $(KERNEL_TESTS) >$(KERNEL_LOG) 2>&1 && passed=0 || passed=$$?; \
		cat $(KERNEL_LOG); exit $$passed

test-unit: bytecode ## tests that need no cluster
	$(PYTEST) -n 2 --dist worksteal -m $(UNIT) $(ARGS)

test-fast: setup ## lint, and the tests of pure code in a few minutes: a first verdict while you work
	$(BIN)/ruff check .
	$(PYTEST) -n 2 --dist worksteal -m $(UNIT) $(FAST_TESTS)

test-apiserver: chart-check ## the chart, and tests against the real kube-apiserver
	$(PYTEST) -n 2 --dist loadfile -m apiserver $(APISERVER_TESTS)

test-cluster: cluster-binary ## the local cluster's own tests, the short user stories, and vLLM where it is cached
	$(PYTEST) -m 'cluster and not full' tests/cluster e2e/stories
	$(PYTEST) tests/agent/test_conformance.py -k vllm

e2e: setup ## all user stories, those of minutes too; with KUBECONFIG=… the first one on that cluster
	@$(if $(KUBECONFIG),$(BIN)/python -m e2e.foreign --kubeconfig $(KUBECONFIG),$(MAKE) --no-print-directory cluster-binary && $(PYTEST) -m cluster e2e/stories)

chaos: cluster-binary ## every fault under load on the local cluster, as a table (about an hour; ARGS="--only node")
	OMP_NUM_THREADS=1 $(BIN)/python -m e2e.chaos $(ARGS)

e2e-containerd: setup ## stories of images of a release on a real kubelet, containerd and runc (root; the first time, half an hour)
	@$(BIN)/python -m e2e.containerd.preflight
	@$(BIN)/python -m e2e.containerd.images
	$(PYTEST) -m containers e2e/stories

e2e-kind: setup ## build the images, install the chart with them on a kind cluster, ask one question (KEEP=1 leaves it up)
	@$(BIN)/python -m e2e.kind $(if $(KEEP),--keep)

images-check: setup ## build every image with buildah and start it as a pod would (half an hour; needs root, debootstrap, 28 GB of disk)
	@images/check.sh

kernels: setup ## every kernel over every shape: on a GPU if there is one, else in the interpreter (hours)
	$(PYTEST) -m kernels tests/runtime/kernels

check: setup ## lint, types, contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m slipway_api.crd --check
	$(BIN)/python -m tests.capabilities --check
	$(BIN)/python -m tests.code_map --check

chart-check: cluster-binary ## lint the chart, and render it with every group of values
	@$(BIN)/python -m tests.chart.lint

format: setup ## fix the findings that ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup ## write the generated files: crds/, the chart's copy, docs/capabilities.md, docs/code-map.md
	$(BIN)/python -m slipway_api.crd
	$(BIN)/python -m tests.capabilities
	$(BIN)/python -m tests.code_map

docs: setup ## build the docs site into build/docs, and check every link and heading of it (SERVE=1 shows it on port 8001)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve --dev-addr 127.0.0.1:8001,build --quiet)
	@$(if $(SERVE),,echo "The site is in build/docs. Any web server can serve it: python3 -m http.server --directory build/docs")

bench: setup ## measure, and print ratios against named peers; a part that cannot run here is named at the end
	-@$(MAKE) cluster-binary
	-@$(BIN)/python -m bench.peers.environments
	OMP_NUM_THREADS=1 $(BIN)/python -m bench

bench-gpu: setup ## measure kernels and whole steps on this GPU, beside the plan on paper
	@$(BIN)/python -m bench.gpu

up: cluster-binary ## a local cluster that stays up; `make down` ends it
	@$(BIN)/python -m e2e.cluster up --detach

down: ## end the cluster of `make up` or `make demo KEEP=1`
	@test ! -x $(BIN)/python || $(BIN)/python -m e2e.cluster stop

clean: ## leave nothing running, and remove what was made here
	@test ! -x $(BIN)/python || $(BIN)/python -m e2e.cluster stop --all
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
