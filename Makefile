# Everything goes through here. Each target first sets up what is missing and skips what is there.
# `make` or `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
THIRD_PARTY := .venv-thirdparty
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-input --require-hashes

# Benchmarks whose name matches; all when empty:  make bench ONLY=runtime
ONLY ?=
# More arguments for pytest:                      make test PYTEST="tests/model -x"
PYTEST ?=
# How many quick tests run at a time, each file's one after another; 0: in pytest itself, as a debugger wants it
WORKERS ?= 2

C_FILES = $(shell git ls-files 'proxy_runtime/*.c' 'proxy_runtime/*.cpp' 'proxy_runtime/*.hpp')
PYTHON_FOLDERS := model workflows activities proxy_runtime scheduling events infra cli scripts tests
PYTHON_FOLDERS += $(wildcard examples benchmarks)

.PHONY: help demo test test-all third-party sanitize bench lint format docs lock clean distclean runtime dev native criu broker system

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: dev native criu broker  ## a fleet, live: a premium job preempts, a basic one moves on and ends bit-identical
	@$(PY) -m scripts.demo

test: dev native criu broker  ## the quick tests
	@$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(PYTEST)

test-all: dev native criu broker  ## every test
	@$(PY) -m pytest $(PYTEST)

third-party: dev native criu $(THIRD_PARTY)/.stamp  ## other people's libraries under `ergo run`, and the page about them; ONLY=name selects
	@$(PY) -m tests.third_party --python $(THIRD_PARTY)/bin/python --only "$(ONLY)"

sanitize: dev  ## the ring, the fabric, the decoders of messages and the device module under address, undefined-behaviour and thread sanitizers
	@$(PY) -m pytest tests/native tests/proxy_runtime/device/test_fabric_stress.py $(PYTEST)

bench: dev native criu broker  ## benchmarks; ONLY=pattern selects by name
	@$(PY) -m benchmarks $(ONLY)

lint: dev  ## formatting, style, types, import contract
	@$(PY) -m ruff format --no-cache --check $(PYTHON_FOLDERS)
	@$(PY) -m ruff check --no-cache $(PYTHON_FOLDERS)
	@$(if $(C_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES))
	@$(VENV)/bin/lint-imports --no-cache
	@$(VENV)/bin/basedpyright

format: dev  ## rewrite the sources as `lint` wants them
	@$(PY) -m ruff format $(PYTHON_FOLDERS)
	@$(PY) -m ruff check --fix $(PYTHON_FOLDERS)
	@$(if $(C_FILES),$(VENV)/bin/clang-format -i $(C_FILES))

docs: dev  ## the documentation, as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html"

lock: dev  ## make requirements/*.txt anew from requirements/*.in
	@scripts/lock.sh $(PY)

clean:  ## remove what builds and tests left in the tree
	@rm -rf site dist build .pytest_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove the virtual environments too
	@rm -rf $(VENV) $(THIRD_PARTY)

# What is missing is set up from here on.

runtime: system $(STAMPS)/runtime
dev: system $(STAMPS)/dev

system:
	@scripts/system_packages.sh

native: runtime
	@$(PY) -m proxy_runtime.build >/dev/null

criu: runtime
	@$(PY) -m proxy_runtime.process.criu_setup >/dev/null

broker: runtime
	@$(PY) -m infra.kafka

$(STAMPS)/venv:
	@scripts/make_venv.sh $(PYTHON) $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: requirements/runtime.txt | $(STAMPS)/venv
	@echo "Installing what a job needs (PyTorch is large: the first time takes minutes) ..."
	@$(PIP_INSTALL) --quiet -r requirements/runtime.txt
	@$(PY) scripts/write_launcher.py
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/runtime
	@echo "Installing what tests and checks need ..."
	@$(PIP_INSTALL) --quiet -r requirements/dev.txt
	@touch $@

# Stands on the other environment, whose packages it finds behind its own: PyTorch is not there twice.
$(THIRD_PARTY)/.stamp: requirements/thirdparty.txt scripts/stand_on.py $(STAMPS)/dev
	@scripts/make_venv.sh $(PY) $(THIRD_PARTY)
	@$(THIRD_PARTY)/bin/python scripts/stand_on.py $(VENV)
	@echo "Installing other people's libraries ..."
	@$(THIRD_PARTY)/bin/python -m pip install --disable-pip-version-check --no-input --require-hashes --quiet -r $<
	@touch $@
