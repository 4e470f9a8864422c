# make train   set up what is missing, then train the quickstart recipe
# make chat    from the text on this machine to a small model that answers, in stages: five minutes on two cores
# make test    set up what is missing, then lint, types and tests: what CI runs
# make test-fast   most of what starts no process: the inner loop, a minute
# make kill-test   200 kills of real runs, each resumed and compared: six minutes on two cores
# make bench   a step of a recipe against others' trainings, which it installs into .venv-peers: half an hour
# make gpu-check   on a machine with a GPU: every check that needs one, without a network, ten minutes
# make bench-gpu   on a machine with a GPU: tokens/s and MFU of recipes, eager and compiled, ten minutes
# make docs    write the generated pages, then build the documentation into site/: no network, half a minute
# make docs-serve   show the documentation at http://127.0.0.1:8000 while you write
# The first two repeat in seconds when pyproject.toml has not changed. PYTHON=python3.12 make train takes another Python;
# JOBS=8 make test runs eight of the other tests at a time, where there are the cores.

# The pip that comes with Python 3.11 takes two minutes to decide what 130 packages need, a new one half of one. Modules
# are compiled when they are imported first: half of what is installed never is.
PYTHON ?= python3
# Some containers set this variable, so that every process compiles torch and Lightning again, two to four seconds
# each. Unset, the bytecode is cached in .venv.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
PEERS := .venv-peers
RUN := $(VENV)/bin/python
JOBS ?= 2
# the first two keep two cores busy by themselves, and are slower beside anything else; one SLURM runs at a time
ALONE := tests/parity tests/kill tests/test_slurm_cluster.py

.PHONY: help train chat test test-fast test-long kill-test lint types bench benchmark gpu-check bench-gpu docs docs-serve clean

train: $(VENV)/.installed
	$(RUN) train.py

chat: $(VENV)/.installed
	$(RUN) train.py pipeline=chat_nano

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

test: $(VENV)/.installed-test lint types
	$(RUN) -m pytest -m "not slow" $(ALONE)
	$(RUN) -m pytest -m "not slow" $(ALONE:%=--ignore=%) --numprocesses $(JOBS) --dist loadfile \
	  --no-loadscope-reorder

test-fast: $(VENV)/.installed-test
	$(RUN) -m pytest -q -m "not slow and not processes and not heavy" --numprocesses $(JOBS)

test-long: $(VENV)/.installed-test
	LONG_TESTS=1 $(RUN) -m pytest

kill-test: $(VENV)/.installed-test
	LONG_TESTS=1 $(RUN) tests/kill/kill_runs.py --kills 200 --record

lint: $(VENV)/.installed-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: $(VENV)/.installed-test
	$(RUN) -m mypy

bench: $(VENV)/.installed-test $(PEERS)/.installed
	$(RUN) benchmarks/peers.py
	$(RUN) benchmarks/peers_reinforcement.py
	$(RUN) benchmarks/peers_vision.py

benchmark: $(VENV)/.installed-test
	$(RUN) benchmarks/step_overhead.py
	$(RUN) benchmarks/watching.py
	$(RUN) benchmarks/linear.py
	$(RUN) benchmarks/head_loss.py
	$(RUN) benchmarks/start.py
	$(RUN) benchmarks/sweep.py
	$(RUN) benchmarks/optimizers.py
	$(RUN) benchmarks/fine_tuning.py
	$(RUN) benchmarks/forgetting.py
	$(RUN) benchmarks/preferences.py
	$(RUN) benchmarks/reinforcement.py
	$(RUN) benchmarks/vision.py
	$(RUN) benchmarks/image_loader.py
	$(RUN) benchmarks/prepare.py
	$(RUN) benchmarks/parity.py
	$(RUN) benchmarks/memory.py
	$(RUN) benchmarks/activation_checkpoint.py
	$(RUN) benchmarks/activation_checkpoint.py share
	$(RUN) benchmarks/plan_accuracy.py
	$(RUN) benchmarks/plan_published.py
	$(RUN) benchmarks/plan_published.py images
	$(RUN) benchmarks/plan_time.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/resume.py
	$(RUN) benchmarks/rollback.py
	$(RUN) benchmarks/spikes.py
	$(RUN) benchmarks/spikes.py clean
	$(RUN) benchmarks/diverging.py
	$(RUN) benchmarks/diagnose.py
	$(RUN) benchmarks/diagnose.py clean
	$(RUN) benchmarks/diagnose.py kinds

gpu-check: $(VENV)/.installed-test
	$(RUN) benchmarks/gpu_check.py

bench-gpu: $(VENV)/.installed-test
	$(RUN) benchmarks/gpu_check.py --throughput

docs: $(VENV)/.installed-test
	$(RUN) -m docs.generator
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

docs-serve: $(VENV)/.installed-test
	$(RUN) -m docs.generator
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: PYTHON=python3.11 make $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.installed: pyproject.toml setup.py | $(VENV)/bin/python
	@echo "Installing into $(VENV): a minute or two, once"
	$(RUN) -m pip install --quiet --no-compile --editable '.[recipes]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml setup.py | $(VENV)/bin/python
	@echo "Installing into $(VENV), with the test extras: a minute or two, once"
	$(RUN) -m pip install --quiet --no-compile --editable '.[test]'
	@touch $(VENV)/.installed $@

$(PEERS)/.installed: benchmarks/contenders/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) logs build site *.egg-info
