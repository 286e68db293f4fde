# Everything runs in a virtual environment that this file makes; nothing but `make browser` and `make slurm` installs outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Libraries and tests are compiled once, not in each of some hundred processes, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick lint types browser slurm soak clean
.DEFAULT_GOAL := test

# pip would compile on one core, and each of some hundred models that nobody loads.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 -x 'transformers/models/|/tests?/' $(VENV)/lib > /dev/null
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/sameday demo

# Types are checked beside the tests: it takes one core more than half a minute. Both must pass.
beside_types = $(BIN)/mypy & types=$$!; $(1); tests=$$?; wait $$types && exit $$tests

# The longest files first, as tests/conftest.py orders them, not those with most tests. Three at once, also on two cores:
# processes that tests start wait for each other, for a scheduler or for a signal.
test: lint
	$(call beside_types,$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not soak' --durations 10)

# For the work of every day, under three minutes on two cores: linter, types, and what starts no process, trains nothing
# and computes little.
quick: lint
	$(call beside_types,$(BIN)/pytest -n 2 --dist loadfile -m 'not soak and not slow' --quick)

lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench

types: $(STAMP)
	$(BIN)/mypy

# Tests of the report open it in Chromium; without one they are skipped, and say so. Needs apt and root.
browser:
	command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

# Tests of suites on a cluster start a SLURM of their own, with two nodes on this machine; without one they are skipped,
# and say so. Needs apt and root.
slurm:
	command -v slurmctld || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; }

# Long trials, run by hand: fifty kills of a training run and of a cache, two hundred of suites, equivalent plans over
# seeds, faults in bf16, several ranks of classification. Over an hour.
soak: $(STAMP)
	$(BIN)/pytest -m soak -s

clean:
	rm -rf $(VENV) runs build src/*.egg-info
