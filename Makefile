# make train: train a real model in float16 and see what loss scaling did.
# make test:  everything CI checks. make test-r has what needs R.
# Both build .venv on the first call and go straight to work on every later one.

PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
OF_KERAS := tests/keras src/preamp/keras docs/keras.md docs/recipes/keras_fit.md
OLDEST_JAX := .venv-oldest-jax
MATRIX := tests/jax/test_autocast_programs.py tests/jax/test_autocast_structures.py
ARGS ?=

.PHONY: train test lint typecheck imports check-code pytest pytest-keras keras-jax keras-torch test-slow test-oldest-jax test-r docs fresh bench format clean

train: .venv/train.stamp
	$(BIN)/preamp train $(ARGS)

# What runs on one core each runs two at a time.
BESIDE := --no-print-directory --jobs 2 --output-sync

test: .venv/test.stamp
	$(MAKE) $(BESIDE) check-code docs
	$(MAKE) --no-print-directory pytest
	$(MAKE) $(BESIDE) pytest-keras

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
pytest-keras: keras-jax keras-torch

keras-jax keras-torch: keras-%: .venv/test.stamp
	KERAS_BACKEND=$* $(BIN)/pytest --quiet $(OF_KERAS)

test-slow: .venv/test.stamp
	$(BIN)/pytest -n 2 --dist loadfile -m slow $(ARGS)

# Autocast's programs without PyTorch, TensorFlow and the peers.
test-oldest-jax: $(OLDEST_JAX)/test.stamp
	$(OLDEST_JAX)/bin/pytest -n 2 --dist loadfile $(MATRIX) $(ARGS)

# What a newcomer meets: an empty home, Python, pip and make. Half an hour more with ARGS=--all.
fresh:
	$(PYTHON) tests/fresh_machine.py $(ARGS)

# Needs R with reticulate and testthat. On one backend of Keras with ARGS=jax.
test-r: .venv/test.stamp
	r/preamp/check $(CURDIR)/$(BIN)/python $(ARGS)

# Warnings are errors. Open build/docs/index.html.
docs: .venv/test.stamp
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --quiet docs build/docs

# Writes docs/benchmarks.md; asserts nothing. Not part of test. Twenty minutes on two quiet cores; ARGS=--quick tries it.
bench: .venv/test.stamp
	$(BIN)/python benchmarks/run.py $(ARGS)

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

# deepspeed builds against the torch that is there, without compiling its kernels. Triton lies beside the other
# packages: PyTorch would import it after TensorFlow, which crashes the process.
.venv/test.stamp: .venv/train.stamp
	$(PIP) --upgrade 'pip>=25.1' setuptools wheel ninja
	$(PIP) --group test
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	[ "$$(uname)" != Linux ] || $(PIP) --no-deps --target .venv/triton triton==3.7.1
	touch $@

$(OLDEST_JAX)/test.stamp: pyproject.toml constraints-oldest-jax.txt
	$(PYTHON) -m venv $(OLDEST_JAX)
	$(OLDEST_JAX)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-oldest-jax.txt --editable '.[jax]' \
		equinox flax hypothesis pytest pytest-xdist sybil
	touch $@

clean:
	rm -rf .venv $(OLDEST_JAX) runs dist build
