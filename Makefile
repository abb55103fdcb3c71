# Everything runs in .venv, created on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One more process than there are cores: tests wait for processes that they have started.
SPREAD := -n $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)') --dist worksteal
QUICK := tests/test_layering.py tests/test_errors.py tests/test_messages.py tests/test_optimize.py \
	tests/compiler/calls tests/compiler/graph tests/compiler/rewriting tests/compiler/capture/test_capture.py \
	tests/passes/test_algebra.py tests/passes/test_cse.py tests/runtime/test_rendering.py tests/runtime/backends/test_candidate.py

.DEFAULT_GOAL := help
.PHONY: help demo test slow quick lint types fuzz bench vendor clean

help: ## show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tsopt needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY) ## export ResNet-18 and show eager, TorchScript and ONNX Runtime side by side
	$(BIN)/tsopt export examples/resnet18.py -o out/resnet18.tsopt

test: lint types ## lint, type check, and all tests except the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -rs --durations=25 --durations-min=2

slow: $(READY) ## the slow tests, which `make test` skips
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m slow

quick: lint ## lint and one minute of tests, for the inner loop
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m "not slow" $(QUICK)

lint: $(READY) ## ruff check and ruff format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

fuzz: $(READY) ## all tests, including the long fuzzing campaigns
	TSOPT_FUZZ=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) --durations=40 -m "" tests

bench: $(READY) ## benchmark real models, eager against compiled and pass by pass; write bench/results
	$(BIN)/python -m pytest bench -p no:cacheprovider --benchmark-only --benchmark-json=bench/results/pytest_benchmark.json
	$(BIN)/python -m bench.side_by_side
	$(BIN)/python -m bench.loops
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.ablation
	$(BIN)/python -m bench.engines
	$(BIN)/python -m bench.precision
	$(BIN)/python -m bench.int8
	$(BIN)/python -m bench.int8_by_hand
	$(BIN)/python -m bench.int8_probe
	$(BIN)/python -m bench.auto
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m bench.trained
	$(BIN)/python -m bench.int4
	$(BIN)/python -m bench.coverage

PAGE := tsopt/runtime/page
vendor: ## fetch the scripts of others that pages contain, from the npm registry
	npm pack --silent --pack-destination $(PAGE) @dagrejs/dagre@3.1.3 uplot@1.6.32
	tar -xzf $(PAGE)/dagrejs-dagre-3.1.3.tgz -C $(PAGE) --strip-components 2 package/dist/dagre.min.js
	tar -xzOf $(PAGE)/dagrejs-dagre-3.1.3.tgz package/LICENSE > $(PAGE)/dagre.LICENSE
	tar -xzf $(PAGE)/uplot-1.6.32.tgz -C $(PAGE) --strip-components 2 package/dist/uPlot.iife.min.js package/dist/uPlot.min.css
	tar -xzOf $(PAGE)/uplot-1.6.32.tgz package/LICENSE > $(PAGE)/uPlot.LICENSE
	rm $(PAGE)/*.tgz

clean: ## remove all generated files, including .venv
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
