# Each target works on a fresh clone. It makes .venv where it is missing, and updates it when pyproject.toml or
# constraints.txt have changed. PYTHON=... names the interpreter of .venv.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
SASS_VENV := .venv-sass
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := dev,flax,train,docs
WORKERS ?= 2
HF_VENV := .venv-hf
HF_PYTHON ?= python3.11
GPU_PYTHON ?= python3
GPU_WORKERS ?= 8

.PHONY: help demo docs test lint format test-more test-gpu check-sass hf-parity constraints clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(INSTALLED) ## train a tiny MoE language model with FP8 weights on 8 emulated CPU devices (under 4 minutes)
	@rm -rf runs/demo
	$(BIN)/moax train --preset tiny --mesh fsdp=2,ep=4 --recipe fp8_block --name demo --cpu-devices 8

docs: $(INSTALLED) ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

test: lint ## lint, then run the short suite (ten minutes on two cores); it ends with a table of what it covered
	$(BIN)/pytest -n $(WORKERS) -m "not more and not gpu"

lint: $(INSTALLED) ## check the code with ruff, its format, and its types with pyrefly
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --summary=none

format: $(INSTALLED) ## fix what ruff can fix, and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-more: $(INSTALLED) ## run the tests that `make test` leaves out, and plant faults that it must see (half an hour on two cores)
	$(BIN)/pytest -n $(WORKERS) -m "more and not gpu"
	$(BIN)/python scripts/mutants.py

check-sass: $(SASS_VENV)/.installed ## compile the kernels, and the block for 4 H200s, to SASS without a GPU (10 minutes)
	PYTHONPATH=src $(SASS_VENV)/bin/python scripts/check_sass.py

$(SASS_VENV)/.installed: constraints.txt Makefile
	@jax=$$(sed -n 's/^jax==//p' constraints.txt) && scripts/venv.sh $(SASS_VENV) --constraint constraints.txt \
	  jax jaxtyping "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" 'nvidia-cuda-nvcc==13.0.*' nvidia-nvvm \
	  nvidia-cuda-runtime nvidia-nvjitlink
	@touch $@

hf-parity: $(INSTALLED) $(HF_VENV)/.installed ## compare moax.hf with transformers on this CPU (HF_PYTHON: a Python for which torch has wheels)
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(HF_VENV)/bin/python scripts/hf_reference.py "$$tmp" && \
	PYTHONPATH=src:tests $(BIN)/python tests/support/hf_parity.py "$$tmp" --write && \
	$(HF_VENV)/bin/python scripts/hf_reference.py "$$tmp" --check

$(HF_VENV)/.installed: Makefile
	@rm -rf $(HF_VENV) && $(HF_PYTHON) -m venv $(HF_VENV)
	@echo "Installing torch and transformers into $(HF_VENV)"
	@$(HF_VENV)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 transformers==5.23.0 safetensors numpy
	@touch $@

test-gpu: ## run the tests of the kernels on Hopper GPUs; GPU_PYTHON needs jax with CUDA
	MOAX_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -n $(GPU_WORKERS) --dist loadgroup -m gpu

constraints: ## update constraints.txt to the newest versions that pyproject.toml admits
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	scripts/venv.sh "$$tmp/venv" '.[$(EXTRAS)]' && \
	{ sed '/^[^#]/,$$d' constraints.txt; \
	  "$$tmp/venv/bin/python" -m pip freeze --exclude moax --disable-pip-version-check | sort -f; } > "$$tmp/new" && \
	cp "$$tmp/new" constraints.txt

clean: ## remove .venv, caches and builds, but keep runs/
	rm -rf $(VENV) $(SASS_VENV) $(HF_VENV) .jax_cache .pytest_cache .hypothesis .ruff_cache build dist docs/_build
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@scripts/venv.sh $(VENV) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
