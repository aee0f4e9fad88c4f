# Everything runs in .venv, which is made on first use (scripts/make_venv.sh) and then reused.
#   make rehearse ARGS="--degrees 4,3"     make test TESTS=tests/unit     make PYTHON=python3.13 test

BIN := .venv/bin
READY := .venv/.ready
CORES := 0.17.1 0.18.2
TESTS ?= tests
WORKERS ?= 2  # processes that run tests, a file each; 0: none beside pytest itself

.DEFAULT_GOAL := help
.PHONY: help rehearse chaos test test-versions lint types format bench cores venv clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

rehearse: $(READY)  ## lose a GPU in a small CPU job and carry on; figures go to build/
	$(BIN)/megatron-ntp rehearse $(ARGS)

chaos: $(READY)  ## let 20 faults happen to a small CPU job; every round goes to build/chaos.json
	$(BIN)/python scripts/chaos.py $(ARGS)

test: lint types cores  ## lint, types, and all tests; on other versions of Megatron in short
	$(BIN)/python -m pytest -n $(WORKERS) $(TESTS) $(ARGS)

test-versions: $(READY) cores  ## the tests of Megatron on every supported version of it
	NTP_TEST_CORES=all $(BIN)/python -m pytest -n $(WORKERS) tests/megatron -k core- $(ARGS)

lint: $(READY)  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check types
	$(BIN)/mypy

format: $(READY)  ## put the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure resharding against parameter-by-parameter exchange
	$(BIN)/python scripts/bench_reshard.py $(ARGS)

cores: $(CORES:%=build/cores/%)  ## fetch other versions of megatron-core for the tests

build/cores/%: | $(READY)
	rm -rf build/core-$*.partial
	$(BIN)/python -m pip install --quiet --no-deps --target build/core-$*.partial megatron-core==$*
	mkdir -p $(@D) && mv build/core-$*.partial $@

venv: $(READY)  ## make .venv only

clean:  ## remove what commands produced, but not .venv
	rm -rf build .mypy_cache .pytest_cache .ruff_cache

$(READY): setup.py scripts/make_venv.sh
	scripts/make_venv.sh .venv
	@touch $@
