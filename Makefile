# make demo: three services on the demo pair, a streamed completion, the proof that the tokens are the target's.
# make test: lint, unit and integration tests. Both need Python 3.11 or newer and what pip brings.

PYTHON ?= python3
# Whatever the environment says of bytecode: the tests start hundreds of processes, and each would compile all sources.
PYTEST := PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest
QUICK := -m "not slow and not gpu"
PIP := .venv/bin/python -m pip
# The files name every package, so pip takes nothing else, and nothing whose hash is not in them.
INSTALL_LOCKED := $(PIP) install --require-hashes --no-deps
ENGINE := .venv/.engine
DEV := .venv/.dev

.PHONY: help demo test tests test-slow check install lint style types format protos docs lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       the services on a small pair, and the proof: 2 to 3 minutes on two cores; at first 0.3 GB to download"
	@echo "                ARGS=--stay serves on afterwards, gRPC and the OpenAI API"
	@echo "make test       lint and tests: 20 to 40 minutes on two cores; at first 0.35 GB more"
	@echo "make test-slow  the long sweeps as well: about an hour"
	@echo "make check      lint, types and the unit tests of what changed: under a minute"
	@echo "make lint | format | protos | docs | lock | install | clean"

demo: $(ENGINE)
	.venv/bin/python -m scripts.demo $(ARGS)

# The types are checked beside the tests, on a core that these often leave idle.
test: style
	$(MAKE) -j 2 types tests

# Two at a time, however many cores there are: tests start services of several processes. In the order of the
# folders: those of real processes take longest and come first. They share the cores with other tests, so those that
# failed (pytest's status 1, nothing else) run a second time by themselves, and then have to pass.
tests: install
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(QUICK) || { [ $$? = 1 ] && \
		echo 'A second time, by themselves: the tests that failed above.' && \
		$(PYTEST) --last-failed --last-failed-no-failures none $(QUICK); }

test-slow: install
	$(PYTEST) -m "not gpu"

check: install
	.venv/bin/python -m scripts.check

lint: style types

style: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: install
	.venv/bin/mypy

format: install
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

protos: install
	.venv/bin/python -m scripts.generate_protos

docs: install
	.venv/bin/python -m scripts.document_settings
	.venv/bin/python -m scripts.document_metrics
	.venv/bin/python -m scripts.dashboards

# Pins what pyproject.toml asks for; LOCK=--upgrade takes the newest versions.
lock: install
	.venv/bin/python -m scripts.lock $(LOCK)

install: $(DEV)

# torch finds what it requires there already, so its installation moves no other package.
$(ENGINE): pyproject.toml requirements/build.txt requirements/orchestrator.txt requirements/gateway.txt \
		requirements/engine.txt requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo 'Installing into .venv; the first time this takes some minutes.'
	$(PYTHON) -m venv .venv
	$(INSTALL_LOCKED) -r requirements/engine.txt
	$(PIP) install -r requirements/torch.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(ENGINE) requirements/dev.txt
	$(INSTALL_LOCKED) -r requirements/dev.txt
	$(PIP) check
	@touch $@

clean:
	rm -rf .venv .cache out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
