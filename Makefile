# make train:    train a real model in float16 and see what loss scaling did.
# make test:     what CI checks.
# make test-all: that, the slow tests, the R package, and other releases of the frameworks. Before a release.
# Both build .venv on the first call and go straight to work on every later one.

comma := ,
# The classifiers say which Pythons. PYTHON is the newest that runs and can make an environment: what pyenv has a shim
# for need not run, and Debian has Pythons without ensurepip.
SUPPORTED := $(sort $(shell sed -n 's/.*Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml))
CAN_BUILD := import sys, ensurepip, venv; sys.exit(sys.version_info < ($(subst .,$(comma) ,$(firstword $(SUPPORTED))),))
PYTHON ?= $(shell for v in $(SUPPORTED); do python$$v -c '$(CAN_BUILD)' 2>/dev/null && newest=python$$v; done; echo $$newest)
BIN := .venv/bin
ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
OF_KERAS := tests/keras src/preamp/keras docs/keras.md docs/recipes/keras_fit.md docs/recipes/batchnorm.md
# Beside JAX, what ARGS="--framework torch" asks for.
FRAMEWORK := $(filter torch,$(subst =, ,$(ARGS)))

# Images of containers set this. The tests start a hundred processes, and each would compile all of TensorFlow or PyTorch
# to bytecode again: importing them takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

# Most programs that tests compile run once: XLA compiles them in a third of the time. `make matrix` and pytest alone take
# XLA's own settings; releases that do not know a flag end the process.
pytest keras-jax keras-torch test-slow: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false

.PHONY: train test test-all lint typecheck imports check-code pytest pytest-keras keras-jax keras-torch test-slow test-r docs fresh matrix constraints bench format clean

train: .venv/train.stamp $(FRAMEWORK:%=.venv/with-%.stamp)
	$(BIN)/preamp train $(ARGS)

# What runs on one core each runs at the same time, the longest first.
BESIDE := --no-print-directory --jobs 3 --output-sync

test: .venv/test.stamp
	$(MAKE) $(BESIDE) docs check-code pytest-keras
	$(MAKE) --no-print-directory pytest

check-code: lint typecheck imports

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/test.stamp
	$(BIN)/mypy

imports: .venv/test.stamp
	$(BIN)/lint-imports

# Three, for two cores: tests wait for the processes that they start.
pytest: .venv/test.stamp
	$(BIN)/pytest -n 3 --dist worksteal $(ARGS)

# Keras has one backend a process. pytest above runs with TensorFlow; what is the same on every backend, PyTorch's runs alone.
pytest-keras: keras-jax keras-torch

keras-jax keras-torch: keras-%: .venv/test.stamp
	KERAS_BACKEND=$* $(BIN)/pytest --quiet $(OF_KERAS)

test-slow: .venv/test.stamp
	$(BIN)/pytest -n 2 --dist worksteal -m slow $(ARGS)

test-all: test test-slow test-r matrix

# What a newcomer meets: an empty home, Python, pip and make; once for each supported Python that is here. It downloads
# everything, PyTorch with CUDA among it, and takes half an hour for each. ARGS="3.12 train" is the first command, on 3.12 alone.
fresh:
	$(PYTHON) tests/fresh_machine.py $(ARGS)

# Writes constraints.txt for all supported Pythons: what pyproject.toml itself names, at releases that go together. Pins that
# are there stay where they can; ARGS=--upgrade moves all to the newest releases.
constraints: .venv/test.stamp
	mkdir -p build
	cp constraints.txt build/constraints.txt
	$(BIN)/uv pip compile --quiet --universal --python-version $(firstword $(SUPPORTED)).0 --fork-strategy fewest \
		--no-header --annotation-style line --all-extras --group test --group pinned \
		--output-file build/constraints.txt $(ARGS) pyproject.toml
	{ echo '# What is tested together, on every supported Python. Written by make constraints.'; \
		sed -n '/preamp (pyproject/s/ *# via.*//p' build/constraints.txt; } > constraints.txt

# Each room with the oldest, the newest and some releases between of its framework; writes docs/versions.md. Some minutes
# and up to 5 GB of downloads a row, on the Pythons that are here. ARGS="torch-2.6 jax-0.12" runs those; ARGS=--list shows all.
matrix: .venv/test.stamp
	$(BIN)/python tests/matrix.py $(ARGS)

# Needs R with reticulate and testthat. On one backend of Keras with ARGS=jax.
test-r: .venv/test.stamp
	r/preamp/check $(CURDIR)/$(BIN)/python $(ARGS)

# Warnings are errors. Open build/docs/index.html.
docs: .venv/test.stamp
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --quiet docs build/docs

# Writes docs/benchmarks.md; asserts nothing. Not part of test. Ten minutes on two quiet cores; ARGS=--quick tries it.
bench: .venv/test.stamp
	$(BIN)/python benchmarks/run.py $(ARGS)

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	@test -n '$(PYTHON)' || { echo 'None of $(SUPPORTED:%=python%) runs here and can make an environment.' \
		'On Debian and Ubuntu: apt install python3-venv. Elsewhere: make PYTHON=/path/to/python$(lastword $(SUPPORTED)) train' >&2; exit 1; }
	@$(PYTHON) -c '$(CAN_BUILD)' || { echo 'PYTHON=$(PYTHON) is older than $(firstword $(SUPPORTED)), or lacks venv or' \
		'ensurepip. Write PYTHON=/path/to/python$(lastword $(SUPPORTED)), or on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The smallest framework, in which the main job trains.
.venv/train.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[jax,cli,report,lab]'
	touch $@

.venv/with-%.stamp: .venv/train.stamp
	$(PIP) --editable '.[$*]'
	touch $@

# deepspeed builds against the torch that is there, without compiling its kernels.
.venv/test.stamp: .venv/train.stamp
	$(PIP) --upgrade 'pip>=25.1' setuptools wheel ninja
	$(PIP) --editable '.[torch,keras,tensorflow]' --group test
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	touch $@

clean:
	rm -rf .venv runs dist build
