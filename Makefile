# make train   set up .venv, then raw text to a validated checkpoint on this machine
# make test    set up, run all tests        make check   lint, formats, types
# make dag     draw the workflow            make bench   measure, side by side
# make slurm-up, slurm-shell, slurm-down   a Slurm of four nodes on this machine (root)
# PYTHON=python3.12 chooses the interpreter, PROFILE=profiles/local the machine.
SHELL := /bin/bash
PROFILE ?= profiles/local
BIN := .venv/bin

.PHONY: train test check dag bench docs slurm-up slurm-shell slurm-down setup lock clean

train: .venv/ready
	$(BIN)/snakemake --profile $(PROFILE) train

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check workflow
	$(BIN)/snakemake --lint
	$(BIN)/mypy
	$(BIN)/python -m forge.config_docs --check

dag: .venv/ready
	tools/dag.sh $(PROFILE)

bench: .venv/ready
	$(BIN)/python -m bench

docs: .venv/ready
	$(BIN)/python -m forge.config_docs

slurm-up: .venv/ready
	@$(BIN)/python -m tests.slurm.cluster up

# Without .venv/ready: to stop a cluster, or to look into it, must not renew the environment it uses.
slurm-shell slurm-down: slurm-%:
	@$(BIN)/python -m tests.slurm.cluster $*

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh

lock: .venv/ready
	tools/lock.sh

clean:
	rm -rf .venv .snakemake .pytest_cache .mypy_cache .ruff_cache
