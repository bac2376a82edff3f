PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "On Debian: apt install python3-venv"; rm -rf .venv; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/tests-ready: .venv/ready tests/requirements.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@touch $@

tests/evm/node_modules/ready: tests/evm/package-lock.json
	@if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --prefix tests/evm && touch $@; \
	else echo "Node.js is not here: the on-chain tests will be skipped."; fi

demo: .venv/ready  ## Set up, and watch two agents do three deals in the sandbox
	@$(BIN)/python cli.py demo

test: .venv/tests-ready tests/evm/node_modules/ready  ## Set up, and run every test
	@$(BIN)/python -m pytest -q $(ARGS)

prove: .venv/ready  ## Let simulated agents, faults and deaths try to lose money: 10,000 deals, at most two minutes
	@$(BIN)/python -m prove $(ARGS)

serve: .venv/ready  ## Serve the sandbox at http://127.0.0.1:8402
	@$(BIN)/python cli.py serve

.venv/bench-ready: .venv/tests-ready bench/requirements.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -r bench/requirements.txt
	@touch $@

bench: .venv/bench-ready  ## Measure, against what it should be compared with
	@$(BIN)/python bench/run.py
	@$(BIN)/python bench/scale.py
	@$(BIN)/python bench/documents.py

contracts: tests/evm/node_modules/ready  ## Compile the test token again
	@node tests/evm/build.mjs

.PHONY: help demo test prove serve bench contracts
