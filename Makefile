# Each target works on a fresh clone. It makes .venv where it is missing, and updates it when pyproject.toml or
# constraints.txt have changed. PYTHON=... names the interpreter of .venv. The files of requirements/ hold the versions of
# the other environments; a target updates an environment when its file has changed.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
SASS_VENV := .venv-sass
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := dev,flax,docs
WORKERS ?= 2
HF_VENV := .venv-hf
FRAMEWORKS := sources maxtext tunix levanter
HF_PYTHON ?= python3.11
GPU_PYTHON ?= python3
GPU_WORKERS ?= 16
TRAINER := .trainer
# The environments of the oldest and the newest jax that pyproject.toml admits, and what `make test-versions` runs in both.
OLDEST_VENV := .venv-oldest
NEWEST_VENV := .venv-newest
VERSION_TESTS := -m "not more and not gpu" tests/block/test_compiled.py tests/block/test_layers.py \
  tests/mesh/test_meshes_found.py tests/tools/test_cache_key.py tests/tools/test_export.py
# JAX's next implementations of checkpoint and of custom derivatives; `make test-next` runs the block and scans by them.
NEXT := JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1
NEXT_TESTS := tests/block/test_moe_behaviour.py tests/block/test_kept.py
# A line for each test as it ends. Each worker takes one core: most of a test's time is that of the compiler.
ON_GPU = MOAX_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false OPENBLAS_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest \
  -p no:benchmark -v -n $(GPU_WORKERS) --dist worksteal
# Compiles for GPUs that this machine does not have.
ON_H200S = JAX_PLATFORMS=cpu PYTHONPATH=src:. $(SASS_VENV)/bin/python scripts/h200.py
# `make test-versions` runs this file whole on the newest jax, so `make test-more` leaves it out.
LOWERING := tests/kernels/test_kernels_lowering.py

.PHONY: help demo docs test lint format test-more test-versions test-next test-gpu test-gpu-more trainer-h200 trainer-gpus check-sass check-launches check-memory check-overlap hf-parity framework-parity constraints clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

DEMO = $(BIN)/python -m lm train --preset tiny --mesh fsdp=2,ep=4 --dtype bfloat16 --out runs/demo --cpu-devices 8

demo: $(INSTALLED) ## train a tiny MoE language model on 8 emulated CPU devices, in bf16 and in FP8, and compare both (under 4 minutes)
	@rm -rf runs/demo
	$(DEMO) --name bf16 --recipe none
	$(DEMO) --name fp8 --recipe fp8_block
	$(BIN)/python -m lm compare runs/demo/bf16 runs/demo/fp8

docs: $(INSTALLED) ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

test: lint ## lint, then run the short suite (9 to 13 minutes on two cores, install included); it ends with a table of what it covered
	$(BIN)/pytest -n $(WORKERS) -m "not more and not gpu"

lint: $(INSTALLED) ## check the code with ruff, its format, and its types with pyrefly
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --summary=none

format: $(INSTALLED) ## fix what ruff can fix, and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# `make test` checks annotations at every call, which takes a twelfth of its time; these suites do not.
test-more test-versions test-next: export MOAX_TEST_ANNOTATIONS = 0

test-more: $(INSTALLED) ## run the tests that `make test` leaves out, and plant faults that it must see (20 to 30 minutes on two cores)
	$(BIN)/pytest -n $(WORKERS) -m "more and not gpu" --ignore $(LOWERING)
	$(BIN)/python scripts/mutants.py
	$(MAKE) test-versions

test-versions: $(OLDEST_VENV)/.installed $(NEWEST_VENV)/.installed ## run some tests on the oldest and on the newest jax that moax admits (three minutes on two cores)
	PYTHONPATH=src $(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) $(VERSION_TESTS) $(LOWERING)
	PYTHONPATH=src $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) $(VERSION_TESTS)
	PYTHONPATH=src $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) -m "not gpu" $(LOWERING)
	$(MAKE) test-next

test-next: $(NEWEST_VENV)/.installed ## run the block, checkpoint and scans by JAX's next autodiff, on the newest jax
	$(NEXT) PYTHONPATH=src $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) -m "not more and not gpu" $(NEXT_TESTS)

# These have their own jax, and the flax that follows it; all other packages are those of .venv, by a path.
$(OLDEST_VENV)/.installed $(NEWEST_VENV)/.installed: .venv-%/.installed: requirements/%.txt $(INSTALLED)
	@rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c "import sysconfig as of; print(of.get_path('purelib'))" >$$(echo $(@D)/lib/python*/site-packages)/others.pth
	@scripts/venv.sh $(@D) --constraint <(grep -vE '^(jax|jaxlib|flax)==' constraints.txt) --upgrade \
	  --requirement requirements/$*.txt
	@touch $@

check-sass: $(SASS_VENV)/.installed ## compile the kernels, and the block for 4 H200s, to SASS without a GPU (10 minutes)
	$(ON_H200S) sass

check-launches: $(SASS_VENV)/.installed ## compile a layer of Qwen3-30B for an H200 without a GPU, and count the kernels that it starts (1 minute)
	$(ON_H200S) launches

check-memory: $(SASS_VENV)/.installed ## compile layers for 8 and 64 H200s without a GPU, and read the memory that they take (10 minutes)
	$(ON_H200S) memory

check-overlap: $(SASS_VENV)/.installed ## compile layers for 8 H200s without a GPU, and read which kernels are beside their collectives (20 minutes)
	$(ON_H200S) overlap

$(SASS_VENV)/.installed: constraints.txt requirements/sass.txt
	@jax=$$(sed -n 's/^jax==//p' constraints.txt) && scripts/venv.sh $(SASS_VENV) --constraint constraints.txt \
	  jax jaxtyping "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" --requirement requirements/sass.txt
	@touch $@

hf-parity: $(INSTALLED) $(HF_VENV)/.installed ## compare every family of moax.hf with transformers on this CPU, 15 minutes (HF_PYTHON: a Python for which torch has wheels)
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(HF_VENV)/bin/python scripts/hf_reference.py "$$tmp" && \
	PYTHONPATH=src:tests:scripts $(BIN)/python tests/support/hf_parity.py "$$tmp" --write && \
	$(HF_VENV)/bin/python scripts/hf_reference.py "$$tmp" --check

$(HF_VENV)/.installed: requirements/hf.txt
	@rm -rf $(HF_VENV) && $(HF_PYTHON) -m venv $(HF_VENV)
	@echo "Installing torch and transformers into $(HF_VENV)"
	@$(HF_VENV)/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements/hf.txt
	@touch $@

framework-parity: $(FRAMEWORKS:%=.venv-%/.installed) ## compare moax.adapters with MaxText, tunix and Levanter (20 minutes; FRAMEWORKS=tunix for one)
	python3 scripts/framework_parity.py $(FRAMEWORKS)

# MaxText and tunix name no JAX for a CPU, and packages that their models never import: they are installed alone.
$(addprefix .venv-,$(addsuffix /.installed,sources maxtext tunix)): .venv-%/.installed: requirements/%.txt requirements/%-needs.txt
	@scripts/venv.sh $(@D) --no-deps --requirement requirements/$*.txt
	@scripts/venv.sh $(@D) --requirement requirements/$*-needs.txt
	@touch $@

.venv-levanter/.installed: requirements/levanter.txt
	@scripts/venv.sh .venv-levanter --requirement requirements/levanter.txt
	@touch $@

test-gpu: ## run every kernel and the block on Hopper GPUs (2 minutes with 16 cores); GPU_PYTHON needs jax with CUDA
	$(ON_GPU) -m "gpu and not more"

test-gpu-more: ## run the GPU tests that `make test-gpu` leaves out
	$(ON_GPU) -m "gpu and more"

trainer-h200: | $(TRAINER)/site ## time training steps of MaxText with its MoE layer and with moax's on one GPU (over 10 minutes; each row is written as it ends)
	PYTHONPATH=src:$(TRAINER)/site:$(TRAINER)/wheels/stubs $(GPU_PYTHON) -m benchmarks.trainer

trainer-gpus: | $(TRAINER)/site ## time training steps of MaxText on meshes of four GPUs (20 minutes; each row is written as it ends)
	PYTHONPATH=src:$(TRAINER)/site:$(TRAINER)/wheels/stubs $(GPU_PYTHON) -m benchmarks.trainer --cases qwen3-30b \
	  --mesh fsdp=4 --mesh fsdp=2,expert=2 --mesh expert=4 --profile --out runs/results/gpus_trainer.json

# A machine without a network takes the folder of wheels from one that has it.
$(TRAINER)/site: | $(TRAINER)/wheels
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $@ $(TRAINER)/wheels/*.whl

$(TRAINER)/wheels:
	PYTHON=$(GPU_PYTHON) benchmarks/trainer/wheels.sh $@

constraints: ## update constraints.txt to the newest versions that pyproject.toml admits
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	scripts/venv.sh "$$tmp/venv" '.[$(EXTRAS)]' && \
	{ sed '/^[^#]/,$$d' constraints.txt; \
	  "$$tmp/venv/bin/python" -m pip freeze --exclude moax --disable-pip-version-check | sort -f; } > "$$tmp/new" && \
	cp "$$tmp/new" constraints.txt

clean: ## remove .venv, caches and builds, but keep runs/
	rm -rf $(VENV) $(SASS_VENV) $(HF_VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(FRAMEWORKS:%=.venv-%) $(TRAINER) .jax_cache .pytest_cache .hypothesis .ruff_cache build dist docs/_build
	find src lm benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@scripts/venv.sh $(VENV) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
