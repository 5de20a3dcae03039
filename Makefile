# make demo: three services on the demo pair, a streamed completion, the proof that the tokens are the target's.
# make test: lint, unit and integration tests. Both need Python 3.11 or newer and what pip brings.

PYTHON ?= python3
PYTEST := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest
INSTALLED := .venv/.installed

.PHONY: help demo test test-slow install lint format protos docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo | test | test-slow | lint | format | protos | docs | install | clean"

demo: install
	.venv/bin/python -m scripts.demo

test: lint
	$(PYTEST) -m "not slow and not gpu"

test-slow: install
	$(PYTEST) -m "not gpu"

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
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

install: $(INSTALLED)

# torch goes first and pinned: a CPU build that pip knows of satisfies the pin, and nothing later moves it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo 'Installing into .venv; the first time this takes some minutes.'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt $$(grep '^torch==' constraints.txt)
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[engine,dev]'
	@touch $@

clean:
	rm -rf .venv .cache out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
