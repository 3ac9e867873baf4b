# `make help` lists the targets. Nothing needs to be installed first but Python 3.11 or newer.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
.PHONY: help env test test-quick e2e cluster checks services tools images lint format docs bench bench-storage soak demo verify pins clean

PY := .venv/bin/python
PYTEST_ARGS ?=
# One worker has the tests of the cluster, which wait more than they work, the others share the rest file by file
# (tests/conftest.py).
WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# $(call stage,NAME,COMMAND) runs a command under a headline and says how long it took (SECONDS starts with the shell).
stage = @printf '\n== %s\n' '$(1)'; $(2); printf '== %s took %s s\n' '$(1)' "$$SECONDS"

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: .venv/ready ## the environment: .venv, from the pins in constraints/

.venv/ready: constraints/dev.txt pyproject.toml tools/environment.sh hatch_build.py \
		dataplane/bagelplane/native/resample.c dataplane/bagelplane/native/planes.c
	$(call stage,environment,tools/environment.sh)

# pytest is last, so that its closing line ends the output.
test: checks images ## everything: environment, checks, all suites
	@printf '\n== pytest\n'
	@$(PYTEST) $(PYTEST_ARGS)

test-quick: checks services ## the same without what is marked cluster or slow: under three minutes
	@printf '\n== pytest\n'
	@$(PYTEST) -m 'not cluster and not slow' $(PYTEST_ARGS)

e2e: images ## what needs a cluster, on the one that the tests start
	@printf '\n== pytest\n'
	@$(PY) -m pytest tests/cluster tests/e2e -m cluster $(PYTEST_ARGS)

cluster: images ## a cluster of one node with all that the tests put into it, until Ctrl-C
	@$(PY) -m tests.cluster

checks: .venv/ready
	$(call stage,ruff check,$(PY) -m ruff check .)
	$(call stage,ruff format,$(PY) -m ruff format --check .)
	$(call stage,mypy,$(PY) -m mypy)
	$(call stage,import-linter,.venv/bin/lint-imports --no-logo)

# Both find the programs that pip does not bring, or build them once, into the user's cache.
services: .venv/ready
	$(call stage,services,$(PY) -m tests.tools.programs versitygw)

tools: .venv/ready ## the programs of the tests' cluster: a quarter of an hour, once
	$(call stage,tools,$(PY) -m tests.tools.programs)

images: tools ## the images of the tests' cluster and what its trainers import: minutes, once
	$(call stage,images,$(PY) -m tests.cluster.images)
	$(call stage,trainer environment,$(PY) -m tests.cluster.trainer_environment)

lint: checks ## ruff, mypy in strict mode, import contracts

format: .venv/ready ## put the code into its form
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

docs: .venv/ready ## the documentation, into site/
	$(call stage,mkdocs,NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet)

bench: .venv/ready ## the benchmark beside the peer (tests/benchmarks/README.md)
	@$(PY) tests/benchmarks/run.py
	@$(PY) tests/benchmarks/handover.py

soak: .venv/ready ## 400 rounds of kills, 200,000 packs, a million damaged inputs: about an hour (tests/soak)
	$(call stage,kills with two ranks,$(PY) -m tests.soak.kills --ranks 2 --rounds 200)
	$(call stage,kills with eight ranks,$(PY) -m tests.soak.kills --ranks 8 --rounds 200)
	$(call stage,memory,$(PY) -m tests.soak.memory --packs 200000 --chart soak-out/memory.png)
	$(call stage,fuzzing,$(PY) -m tests.soak.fuzz --inputs 1000000)

bench-storage: .venv/ready ## S3 behind a slow network beside local files: table, PNG, every request accounted for
	@$(PY) tests/benchmarks/storage.py

demo: .venv/ready ## data over S3 into two trainers, a kill, a resume, another world size, the same bits
	@.venv/bin/bagelplane demo

verify: .venv/ready ## generated files are what the sources say
	$(call stage,generated files,$(PY) -m bagelplane.cli.reference --check)

COMPILE := tools/environment.sh uv pip compile --python $(PY) --quiet --universal --python-version 3.11 \
	--fork-strategy fewest --generate-hashes --no-emit-index-url --no-header --no-annotate \
	$(if $(UPGRADE),--upgrade)

pins: .venv/ready ## constraints/*.txt anew from pyproject.toml (UPGRADE=1: newest versions)
	@$(COMPILE) pyproject.toml --extra dev --output-file constraints/dev.txt
	@$(COMPILE) pyproject.toml --extra video --constraints constraints/dev.txt --output-file constraints/sidecar.txt
	@for name in operator client build; do $(COMPILE) constraints/$$name.in --constraints constraints/dev.txt \
		--output-file constraints/$$name.txt; done
	@$(COMPILE) constraints/peer.in --constraints constraints/dev.txt --output-file constraints/peer.txt
	@echo 'nemo-automodel==0.7.0' | $(COMPILE) --no-deps - >> constraints/peer.txt
	@$(COMPILE) constraints/uv.in --output-file constraints/uv.txt
	@if grep -nE '://|--(extra-)?index-url|--find-links' constraints/*.txt; then \
		echo 'pins: the lines above name a download address. Fix: remove the setting that puts them there' >&2; exit 1; fi

clean: ## remove environments and all that was built
	@rm -rf .venv .venv-* build dist site .cache demo-out bench-out soak-out dataplane/bagelplane/native/*.so \
		.pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
