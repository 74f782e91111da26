# `make demo` and `make test` need Python 3.11+, make, a C++ compiler and a package index; the rest sets itself up.
# MODEL=path runs a demo on a local checkpoint. GPU_PYTHON is an interpreter that already has torch with CUDA.

GPU_PYTHON ?= python3
PYTHON     ?= $(shell .ci/find-python)
VENV       := .venv
BIN        := $(VENV)/bin
READY      := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-parallel serve test test-cpu test-kernels exhaustive fuzz mutants coverage lint types wheel gpu setup clean

demo: setup
	$(BIN)/python -m benchmarks demo $(if $(MODEL),--model "$(MODEL)")

# RANKS=2 starts two processes. They use GPUs where there is one for each.
RANKS ?= 4

demo-parallel: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		-m benchmarks demo-parallel $(if $(MODEL),--model "$(MODEL)")

# An OpenAI-compatible server of a small random model, or of MODEL=path; SERVE is more of its options.
serve: setup
	@test -n "$(MODEL)" || $(BIN)/python -m benchmarks.checkpoints build/chat
	$(BIN)/python -m layers.serve $(if $(MODEL),"$(MODEL)",build/chat --max-batch-tokens 512 --num-blocks 64) $(SERVE)

test: test-kernels test-cpu

# The kernels run twice: interpreted, and compiled ahead of time for an H200 (with the rest).
# Two workers with one thread each: more threads than cores would wait for each other. Each takes half of the files and
# then from the other, so that what a file sets up is set up once.
# Bytecode is kept whatever the environment says: each of a hundred processes would compile the same files.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=15

test-cpu: setup
	$(PYTEST) tests

test-kernels: setup
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

# Wrong edits that some test has to notice; ONLY=pattern picks a few. Not part of `make test`: half an hour.
mutants: setup
	$(BIN)/python -m tests.mutants $(if $(ONLY),--only "$(ONLY)")

# Random layers against a float64 oracle, on the CPU unless FUZZ says otherwise: make fuzz FUZZ="--cases 5000 --seed 1".
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Every launch that a plan can make, compiled for every GPU that docs/PERFORMANCE.md names, and all combinations of options,
# sizes and dtypes of which `make test` takes each once or twice.
exhaustive: setup
	TRITON_INTERPRET=1 $(PYTEST) -m exhaustive tests/kernels
	$(PYTEST) -m exhaustive tests

# Every MoE family of transformers: measured, and docs/coverage.md written from it.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.coverage

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: setup
	PYTHON=$(BIN)/python bash .ci/wheel-smoke

gpu:
	$(GPU_PYTHON) -m benchmarks gpu

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist
