# make train   set up .venv, then raw text to a validated checkpoint on this machine
# make reproduce   export what make train made, verify it, train it again and compare (2 minutes)
# make setup EXTRAS=tracking,evaluate   add what a config may turn on: pyproject.toml lists the extras
# make test    add what these tests need, run them (6 minutes)   make check   lint, formats, types
# make test-all, test-tools   the other tests: all of training and Slurm; pages, bench, set-up (CONTRIBUTING.md)
# make faults  every fault at every point of a checkpoint's way (6 minutes)
# make labs    the programs of config/labs on a real Slurm, every event (25 minutes; root)
# make absences   Slurm's controller away for 22 s at every moment of a run (6 minutes; root)
# make storm   goodput under preemption, Forge beside a plain sbatch script (12 minutes; root; docs/measured/storm.md)
# make gpu     check Forge on the GPU of this machine, with its own PyTorch (minutes; docs/gpu.md)
# make gpu-wheels   download the packages that such a machine without internet lacks
# make dag     draw the workflow into build/  make bench   measure, side by side
# make slurm-up, slurm-shell, slurm-down   a Slurm of four nodes on this machine (root)
# make slurm-up TWIN=FILE   a small twin of the cluster where `forge profile --save FILE` wrote the file
# make wheelhouse   download all packages; make train WHEELHOUSE=wheelhouse installs them without internet
# PYTHON=python3.12 chooses the interpreter, PROFILE=profiles/local the machine.
SHELL := /bin/bash
PROFILE ?= profiles/local
BIN := .venv/bin
comma := ,
READY := .venv/ready $(patsubst %,.venv/with-%,$(subst $(comma), ,$(EXTRAS)))

.PHONY: train reproduce test test-all test-tools test-others test-weekly test-times faults labs absences storm check lint types dag bench docs slurm-up slurm-shell slurm-down setup lock wheelhouse gpu gpu-wheels clean

# A command that says itself how Ctrl-C has ended it. make ends by that signal, too: without the trap it would
# print an error below.
define interruptible
	@echo "$(1)"
	@trap 'exit 0' INT; $(1)
endef

train: $(READY)
	$(call interruptible,$(BIN)/snakemake --profile $(PROFILE) train)

# From text to a certificate: `train` ends within seconds where it has trained already.
reproduce: train
	$(BIN)/forge export base --to build/base
	$(call interruptible,$(BIN)/forge reproduce build/base --checkpoints results/base)

# A test that ends its worker ends the run: on a new worker its file would start again, up to twelve times.
# One process more than the cores of CI: tests wait. With four, each test took 28 % longer, and all of them as long.
# Files in the order of tests/support/circles.py, long ones first.
pytest = $(BIN)/python -m pytest -n $(processes) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
processes := 3
# Checks of a GPU run where they can on a CPU, at a small size.
test test-all test-tools test-others test-weekly test-times: export FORGE_GPU_CHECKS := cpu
# Images of containers often set it: each of a thousand processes would compile changed modules again.
test test-all test-tools test-others test-weekly test-times: export PYTHONDONTWRITEBYTECODE :=
# Each of thousands of processes imports NumPy, whose BLAS would start threads that spin for 0.05 s.
test test-all test-tools test-others test-weekly test-times: export OPENBLAS_NUM_THREADS := 1

test: .venv/with-test
	$(pytest) -m default

test-all: .venv/with-dev
	$(pytest) -m all

test-tools: .venv/with-dev
	$(pytest) -m tools

# Both at once: the last file of one keeps no process waiting.
test-others: .venv/with-dev
	$(pytest) -m "all or tools"

# Stories of minutes each, that shorter ones of `all` tell in part, and benches at their smallest size.
test-weekly: .venv/with-dev
	$(pytest) -m weekly

# Renews tests/times.tsv: the seconds of every test, by which files are put in order. On an idle machine.
test-times: .venv/with-dev
	$(pytest) --times=tests/times.tsv

# Every fault at every point, and random ones, whose seed is printed; renews the tables of docs/faults.md.
faults: export FORGE_FAULTS := all
faults: export FORGE_FAULTS_SEED := $(or $(FORGE_FAULTS_SEED),$(shell echo $$RANDOM))
faults: export FORGE_FAULTS_RESULTS := $(shell mktemp -u)
faults: .venv/with-dev
	@echo "FORGE_FAULTS_SEED=$$FORGE_FAULTS_SEED make faults   brings these random interruptions back"
	$(BIN)/python -m pytest tests/faults -n 2 --dist worksteal --deselect tests/faults/test_table.py
	$(BIN)/python tests/faults/outcomes.py $$FORGE_FAULTS_RESULTS

# Every event with each program and launcher; renews the table of docs/labs.md.
labs: export FORGE_LABS := all
labs: export FORGE_LABS_RESULTS := $(shell mktemp -u)
labs: export FORGE_TEST_SLURM := required
labs: .venv/with-dev
	$(BIN)/python -m pytest tests/slurm/test_programs.py -k struck $(PYTEST_ARGS)
	$(BIN)/python tests/slurm/labs_table.py $$FORGE_LABS_RESULTS

# A restart of 3 s is part of `make test-all`.
absences: export FORGE_ABSENCES := all
absences: export FORGE_TEST_SLURM := required
absences: .venv/ready
	$(BIN)/python -m pytest tests/slurm/test_silence.py -k restarts $(PYTEST_ARGS)

# Raw files stay in build/storm: a rerun measures what is missing there.
storm: .venv/ready
	$(BIN)/python -m bench.storm --contender naive-requeue --contender forge --seeds 1 --minutes 5 --mean-sec 60 --results build/storm

check: lint types

lint: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check workflow forge/plugins
	$(BIN)/snakemake --lint
	$(BIN)/python -m tools.config_docs --check

types: .venv/with-dev
	$(BIN)/mypy

dag: $(READY)
	tools/dag.sh $(PROFILE)

bench: .venv/with-dev
	$(BIN)/python -m bench

docs: $(READY)
	$(BIN)/python -m tools.config_docs

slurm-up: $(READY)
	@$(BIN)/python -m tools.slurm_cluster up $${TWIN:+--twin "$$TWIN"}

# Without .venv/ready: to stop a cluster, or to look into it, must not renew the environment it uses.
slurm-shell slurm-down: slurm-%:
	@$(BIN)/python -m tools.slurm_cluster $*

setup: $(READY)

.venv/ready: pyproject.toml constraints.txt hashes.txt tools/setup.sh
	tools/setup.sh

# test: what `make test` needs; dev: all tests and checks. A renewed .venv has again what was added to the old one.
.venv/with-%: .venv/ready
	tools/setup.sh $*

lock: .venv/with-dev .venv/with-gigatoken
	tools/lock.sh

wheelhouse:
	tools/wheelhouse.sh

# Without .venv/ready: with the Python and PyTorch of the machine that has the GPU.
gpu:
	@tools/gpu.sh $(PYTEST_ARGS)

gpu-wheels:
	@tools/gpu_wheels.sh

clean:
	rm -rf .venv .snakemake .pytest_cache .mypy_cache .ruff_cache
