# make train: train a real model in float16 and see what loss scaling did.
# make test:  everything CI checks. make test-r has what needs R.
# Both build .venv on the first call and go straight to work on every later one.

PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
OF_KERAS := tests/keras src/preamp/keras docs/keras.md
OLDEST_JAX := .venv-oldest-jax
MATRIX := tests/jax/test_autocast_programs.py tests/jax/test_autocast_structures.py
ARGS ?=

.PHONY: train test lint typecheck imports check-code pytest pytest-keras test-slow test-oldest-jax test-r bench format clean

train: .venv/train.stamp
	$(BIN)/preamp train $(ARGS)

test: check-code pytest pytest-keras

check-code: lint typecheck imports

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/test.stamp
	$(BIN)/mypy

imports: .venv/test.stamp
	$(BIN)/lint-imports

pytest: .venv/test.stamp
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# Keras has one backend a process. pytest above has run with TensorFlow.
pytest-keras: .venv/test.stamp
	KERAS_BACKEND=jax $(BIN)/pytest -n 2 --dist loadfile $(OF_KERAS)
	KERAS_BACKEND=torch $(BIN)/pytest -n 2 --dist loadfile $(OF_KERAS)

test-slow: .venv/test.stamp
	$(BIN)/pytest -n 2 --dist loadfile -m slow $(ARGS)

# Autocast's programs without PyTorch, TensorFlow and the peers.
test-oldest-jax: $(OLDEST_JAX)/test.stamp
	$(OLDEST_JAX)/bin/pytest -n 2 --dist loadfile $(MATRIX) $(ARGS)

# Needs R with reticulate and testthat.
test-r: .venv/test.stamp
	r/preamp/check $(CURDIR)/$(BIN)/python

# Reports, asserts nothing. Not part of test.
bench: .venv/test.stamp
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/policies.py --quick
	$(BIN)/python benchmarks/lens.py
	$(BIN)/python benchmarks/layerwise.py
	$(BIN)/python benchmarks/torch_scaler.py
	$(BIN)/python benchmarks/torch_autocast.py
	$(BIN)/python benchmarks/keras_optimizer.py
	$(BIN)/python benchmarks/jax_step.py
	$(BIN)/python benchmarks/jax_autocast.py
	$(BIN)/python benchmarks/deepspeed_overflow.py

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first and pinned exactly: a looser request may bring several GB of CUDA packages.
.venv/train.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[torch,cli,report,lab]'
	touch $@

# deepspeed builds against the torch that is there, without compiling its kernels.
.venv/test.stamp: .venv/train.stamp
	$(PIP) --upgrade 'pip>=25.1' setuptools wheel ninja
	$(PIP) --group test
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	touch $@

$(OLDEST_JAX)/test.stamp: pyproject.toml constraints-oldest-jax.txt
	$(PYTHON) -m venv $(OLDEST_JAX)
	$(OLDEST_JAX)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-oldest-jax.txt --editable '.[jax]' \
		equinox flax hypothesis pytest pytest-xdist sybil
	touch $@

clean:
	rm -rf .venv $(OLDEST_JAX) runs dist build
