# Two commands do all on a fresh machine: `make demo` and `make test`. Everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Releases that this project is tested with; pyproject.toml says what it needs.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format bench docs notebooks wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed  ## the main job on a real model: MiniLM under 64 MiB, most of it left on disk
	$(BIN)/python examples/minilm_demo.py

test: $(VENV)/.installed  ## the whole test suite, on CPU and on the simulated accelerator
	$(BIN)/python -m pytest --numprocesses 2

lint: $(VENV)/.installed  ## style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv-bench/.installed: constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

bench: .venv-bench/.installed  ## side by side with accelerate; its own environment, since no peer is a dependency
	.venv-bench/bin/python benchmarks/main_job.py
	.venv-bench/bin/python benchmarks/loading.py
	.venv-bench/bin/python benchmarks/dispatch.py
	.venv-bench/bin/python benchmarks/prediction.py
	.venv-bench/bin/python benchmarks/quantization.py
	.venv-bench/bin/python benchmarks/planning.py
	.venv-bench/bin/python benchmarks/training.py

docs: $(VENV)/.installed  ## runs every example in README and docs
	$(BIN)/python -m pytest tests/docs

notebooks: $(VENV)/.installed  ## executes the notebooks in place
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

wheel: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
