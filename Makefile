# From a fresh clone and nothing else:  make demo   and   make test.
#
# Both work in a virtual environment of their own, .venv, with the packages of .ci/constraints/cpu.txt and
# torch's CPU build. Python 3.11 or newer is needed: `make PYTHON=python3.12 demo` picks another one.

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
FRAMEWORKS := swift verl openrlhf orz skyrl unsloth
export AUTOTUNE_FRAMEWORKS ?= $(CURDIR)/$(OVERLAYS)/frameworks

# Two cores and tiny tensors: torch's own threads only get in each other's way. Nothing is downloaded at run time.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Hundreds of processes import the package: none compiles what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in so many processes, a file's in one of them (tests/conftest.py says which belong together): one more than
# CI has processors, since many of them wait for a server, a deadline or a cluster.
TEST_JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -q --durations=30 -n $(TEST_JOBS) --dist loadfile
# Tests start servers, clusters and ranks, which a busy machine delays. What failed runs once more, one test at a time, and
# must pass then; both runs are printed. Exit code 1 is pytest's "some tests failed": after any other, some did not run.
TESTS = $(PYTEST) -m "$(1)" || { [ $$? -eq 1 ] && $(BIN)/python -m pytest -q -x --last-failed --last-failed-no-failures none -m "$(1)"; }

DEMO_MODEL := .demo/model
DEMO_SHAPE := --hidden 64 --heads 2 --kv-heads 2 --intermediate 128 --layers 8 --vocab 512
DEMO_BATCH ?= 64
DEMO_LIMIT ?= 1150M
DEMO_BUDGET ?= 4m
DEMO_OUT ?= demo-out

# Environments of public measurements: packages of their time laid over .venv, whose torch they share; and Liger over today's.
FORESIGHT_OVERLAYS := tf-4.48 tf-4.45 liger

.PHONY: help demo pictures mutants test test-all test-long test-release test-cuda test-cuda-quick test-gpu sweep-demo bench-foresight bench-fakegpu bench-speed bench-rollout bench-intervals bench-screening bench-step-models bench-demo bench-search bench-search-budgets search-pages bench-rig bench-diagnose first-light first-light-predictions first-light-emulated bench-cards bench-verl-logs \
  bench-scale bench-preflight bench-emulated bench-emulated-frameworks bench-emulated-lengths bench-recorded-steps cuda cuda-frameworks cuda-reports fuzz test-faults trl-overlays field-lists step-models frameworks format clean test-guard-faults bench-guard

help:
	@echo "make demo          set up, then tune a tiny made-up model on this machine's CPU: real TRL, real vLLM"
	@echo "make pictures      the demo once more, drawn for docs/pictures, its files kept as the example"
	@echo "make test          set up, then ruff, mypy and the fast tests"
	@echo "make test-all      the slow tests, and only those"
	@echo "make test-long     further variants of the slow tests: every fault on Ray, every sharding, every model (40 minutes)"
	@echo "make test-release RELEASE=transformers==5.24.0  a release (or several, in quotes) that is not pinned yet, laid over .venv, and what it can change"
	@echo "make cuda          an environment for emulated GPUs: a CUDA build of torch, TRL, vLLM (9 GB)"
	@echo "make cuda-reports  for emulated GPUs: ms-swift 3.1.1 and Open-Reasoner-Zero with the releases of examples' reports (14 GB)"
	@echo "make test-cuda     the tests that need a GPU, on emulated ones, in that environment"
	@echo "make test-cuda-quick  the few of them that say most"
	@echo "make sweep-demo    measure the demo's whole space, three times each (long)"
	@echo "make bench-foresight  predicted memory against what was publicly measured, row by row"
	@echo "make bench-cards    predicted training seconds on H100, H200, B200 and A6000, and prime-rl's measured ones"
	@echo "make bench-verl-logs  predicted seconds of verl's phases, and those of its public logs"
	@echo "make bench-fakegpu  predicted and emulated peaks beside those that FakeGPU's page lists, measured and its own"
	@echo "make bench-speed   predicted training speed against what was publicly measured, row by row"
	@echo "make bench-rollout  simulated rollouts against vLLM on this machine's CPU"
	@echo "make bench-intervals  200 probes of the demo's model and their confirmations: do the intervals overlap? (ten minutes on a quiet machine)"
	@echo "make bench-screening  how long predicting every candidate of a large space takes"
	@echo "make bench-step-models  predictions from step models, compared with a trace of each candidate"
	@echo "make bench-advice  advice against an exhaustive evaluation of every neutral change"
	@echo "make atlas         the table of what fits where, and maps of twelve pairs"
	@echo "make bench-latency  seconds to an answer, process start included (--python: an environment without torch)"
	@echo "make step-models   the step models that the package ships, surveyed again (MODELS='Qwen2.5-7B' for some)"
	@echo "make bench-search  the search beside others, on spaces whose optimum is known"
	@echo "make search-pages  its pages of results, written again of the studies that are stored"
	@echo "make bench-search-budgets  the search in budgets of minutes, by its first probe (five minutes)"
	@echo "make bench-demo    what the demo has to find, and twenty runs of it (45 minutes; it continues)"
	@echo "make bench-rig     what it saves to measure many candidates on one loaded model"
	@echo "make bench-diagnose  how often diagnose names the right cause, on labelled logs"
	@echo "make bench-scale   how the search scales with slots, and what the driver itself costs"
	@echo "make bench-emulated  predicted memory against that of emulated cards, in the environment of test-cuda (hours)"
	@echo "make bench-emulated-frameworks  GRPO of ms-swift, verl, OpenRLHF and SkyRL with vLLM on emulated cards, beside what is predicted"
	@echo "make bench-emulated-lengths  ms-swift with rows of 1,000 to 30,000 tokens on emulated cards, and what is predicted"
	@echo "make bench-recorded-steps  torch's own record of ms-swift's and verl's steps, replayed, and what formulas make of a few"
	@echo "make bench-preflight  how long preflight takes, measured and from the record"
	@echo "make bench-guard   what watching a training costs it"
	@echo "make test-faults   every fault at every place, many times over (long)"
	@echo "make mutants     small wrong changes of the code: which of them does a fast test notice? (an hour; MUTANTS=20 for fewer)"
	@echo "make test-guard-faults  each fault of a guarded run, twenty times"
	@echo "make fuzz          a hundred thousand broken inputs for everything that reads what others wrote (FUZZ=9: a million)"
	@echo "make first-light   on a machine with a GPU, in the environment you train with: what nine minutes can settle (MINUTES=30: all)"
	@echo "make first-light-predictions GPU=H100  its points, predicted where no GPU is"
	@echo "make first-light-emulated GPU=H100  the same program on an emulated card, in the environment of test-cuda"
	@echo "make test-gpu      there as well: the tests that need one"
	@echo "make trl-overlays  other supported versions of TRL, for the slow tests"
	@echo "make field-lists   settings of TRL, verl, OpenRLHF, SkyRL, prime-rl and Open-Reasoner-Zero, listed again from their releases"
	@echo "make frameworks    ms-swift, verl, OpenRLHF, SkyRL and unsloth without what only a GPU machine has, for the slow tests"

# One thread: two threads of one process wait for each other whenever something else runs.
demo: export OMP_NUM_THREADS := 1
demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/autotune run --model $(DEMO_MODEL) --gpus cpu --space demo --global-batch $(DEMO_BATCH) \
	  --memory-limit $(DEMO_LIMIT) --budget $(DEMO_BUDGET) --out $(DEMO_OUT) --fresh

# A run of its own, so that the pictures of docs/pictures are of what is there now: on a quiet machine, with Chromium.
pictures: $(READY)
	$(BIN)/python docs/make_pictures.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(call TESTS,not slow and not gpu)

# A release that is not pinned yet, laid over .venv without its dependencies, and the tests of what it can change.
RELEASE_TESTS := tests/worker/test_seams.py tests/worker/test_methods.py tests/worker/test_grpo_probe.py \
  tests/frameworks/test_trl_fields.py tests/frameworks/test_trl_adapter_targets.py tests/counted_memory \
  tests/diagnosis/test_provoked.py
test-release: $(READY)
	@[ -n "$(RELEASE)" ] || { echo "name the release: make test-release RELEASE=trl==1.16.0" >&2; exit 2; }
	rm -rf $(OVERLAYS)/release
	$(PIP_INSTALL) --quiet --target $(OVERLAYS)/release $(RELEASE)
	PYTHONPATH=$(CURDIR)/$(OVERLAYS)/release $(PYTEST) $(RELEASE_TESTS)

# Only what `make test` leaves out. `test-long` has further variants of the slow tests, which CI has no time for.
test-all: $(READY) trl-overlays frameworks $(OVERLAYS)/foresight-liger/.ready
	$(call TESTS,slow and not gpu and not long)

# The tests of these rooms once under coverage, then the cheapest of them for each mutant. It goes on where it
# was ended. The second command tries what an import executes: nothing of the package is loaded when it begins.
# Reading 2 tries the mutants of the committed result again; reading 1 draws others.
MUTANTS ?= 300
MUTANT_READING ?= 2
MUTANT_TESTS = tests/estimate tests/search tests/probe tests/prediction tests/preflight tests/request tests/frameworks \
	tests/executors/test_slots.py tests/executors/test_missing_gpus.py
mutants: $(READY)
	$(BIN)/python -m tests.mutants --number $(MUTANTS) --reading $(MUTANT_READING) --tests $(MUTANT_TESTS)
	$(BIN)/python -m tests.mutants --number $(MUTANTS) --reading $(MUTANT_READING) --tests $(MUTANT_TESTS)

test-long: $(READY) trl-overlays frameworks
	$(call TESTS,slow and long and not gpu)

sweep-demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/python benchmarks/sweep_demo.py --model $(DEMO_MODEL) --memory-limit $(DEMO_LIMIT)

bench-foresight: $(READY) $(FORESIGHT_OVERLAYS:%=$(OVERLAYS)/foresight-%/.ready)
	$(BIN)/python benchmarks/foresight.py --environments $(OVERLAYS)

bench-cards: $(READY)
	$(BIN)/python benchmarks/cards.py

bench-verl-logs: $(READY)
	$(BIN)/python benchmarks/verl_logs.py

bench-fakegpu: $(READY) $(OVERLAYS)/foresight-tf-5.12/.ready $(OVERLAYS)/cuda/.ready
	$(BIN)/python benchmarks/fakegpu.py --environments $(OVERLAYS) --python $(OVERLAYS)/cuda/bin/python

bench-speed: $(READY) $(FORESIGHT_OVERLAYS:%=$(OVERLAYS)/foresight-%/.ready)
	$(BIN)/python benchmarks/speed.py --environments $(OVERLAYS)

bench-rollout: $(READY)
	$(BIN)/python benchmarks/rollout.py

$(OVERLAYS)/foresight-%/.ready: .ci/constraints/foresight-%.txt $(READY)
	rm -rf $(@D)
	$(PINNED) $< --quiet --target $(@D)
	touch $@

# Each study is kept: a call goes on where the last one ended.
bench-intervals: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/python benchmarks/intervals.py --model $(DEMO_MODEL)

bench-screening: $(READY)
	$(BIN)/python benchmarks/screening.py

bench-step-models: $(READY)
	$(BIN)/python benchmarks/step_models.py

.PHONY: bench-latency bench-advice atlas
bench-latency: $(READY)
	$(BIN)/python benchmarks/latency.py

bench-advice: $(READY)
	$(BIN)/python benchmarks/advice.py

atlas: $(READY)
	$(BIN)/python .ci/make_atlas.py

bench-search: $(READY)
	$(BIN)/python benchmarks/search.py

search-pages: $(READY)
	$(BIN)/python benchmarks/search_pages.py

bench-search-budgets: $(READY)
	$(BIN)/python benchmarks/search_budgets.py

bench-demo: export OMP_NUM_THREADS := 1
bench-demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/python benchmarks/demo_runs.py --model $(DEMO_MODEL) --pairs 2 --runs 20

bench-scale: $(READY)
	$(BIN)/python benchmarks/scale.py

bench-preflight: $(READY)
	$(BIN)/python benchmarks/preflight.py

test-faults: $(READY)
	$(BIN)/python -m tests.faults

test-guard-faults: $(READY)
	$(BIN)/python benchmarks/guard_faults.py

bench-guard: $(READY)
	$(BIN)/python benchmarks/guard_overhead.py

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --share $(or $(FUZZ),1)

bench-rig: $(READY)
	$(BIN)/python benchmarks/rig_reuse.py

bench-diagnose: $(READY)
	$(BIN)/python benchmarks/diagnose.py

# The environment that `pip install '.[train]'` made, not .venv, which holds CPU builds.
MINUTES ?= 9
first-light:
	$(PYTHON) benchmarks/first_light.py --minutes $(MINUTES)

test-gpu:
	$(PYTHON) -m pytest -q -m gpu

# Emulated GPUs: CUDA builds of torch and vLLM that run where no GPU is (docs/emulated-gpus.md).
CUDA_VENV := $(OVERLAYS)/cuda
CUDA_PYTHON := $(CURDIR)/$(CUDA_VENV)/bin/python
ON_CARDS := PYTHONPATH=$(CURDIR) $(CUDA_PYTHON) -m autotune rehearse --python $(CUDA_PYTHON)
GPU_TESTS = $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')

cuda: $(CUDA_VENV)/.ready

test-cuda: $(CUDA_VENV)/.ready $(CUDA_VENV)-swift/.ready $(CUDA_VENV)-gptq/.ready
	$(ON_CARDS) --gpus 1xA100-80G --stride 16 -- $(CUDA_PYTHON) -m pytest -q -m gpu $(GPU_TESTS)
	$(ON_CARDS) --gpus 2xA100-80G --stride 16 -- $(CUDA_PYTHON) -m pytest -q -m gpu $(GPU_TESTS)
	PYTHONPATH=$(CURDIR) AUTOTUNE_CUDA_PYTHON=$(CUDA_PYTHON) $(CUDA_PYTHON) -m pytest -q tests/emulator

# A fit, a refusal with what follows it, two ranks, slots of eight cards.
test-cuda-quick: $(CUDA_VENV)/.ready
	$(ON_CARDS) --gpus 2xA100-80G -- $(CUDA_PYTHON) -m pytest -q -m gpu tests/probe/test_on_gpus.py tests/gpu -k "$(CUDA_QUICK)"
	PYTHONPATH=$(CURDIR) AUTOTUNE_CUDA_PYTHON=$(CUDA_PYTHON) $(CUDA_PYTHON) -m pytest -q \
	  tests/emulator/test_slots_on_cards.py tests/emulator/test_faults_on_cards.py
CUDA_QUICK := bf16 or ballast_leaves

# The program of `make first-light` for a card that is not here. Its times are scaled: steps on emulated cards take as long
# as their host code on this machine. A folder that has results is gone on from.
GPU ?= H100
SCALE ?= 10
first-light-predictions: $(CUDA_VENV)/.ready
	PYTHONPATH=$(CURDIR) $(CUDA_PYTHON) benchmarks/first_light.py --predict $(GPU)

first-light-emulated: $(CUDA_VENV)/.ready
	$(ON_CARDS) --gpus 1x$(GPU) --stride 16 -- $(CUDA_PYTHON) benchmarks/first_light.py --minutes $(MINUTES) --scale $(SCALE)

# What was emulated stays in the file: the next call goes on after it.
EMULATED_RAW ?= .emulated.jsonl
bench-emulated: $(READY) $(CUDA_VENV)/.ready
	$(BIN)/python benchmarks/emulated.py --python $(CUDA_VENV)/bin/python --raw $(EMULATED_RAW)

# ms-swift, verl, OpenRLHF, SkyRL and GPTQModel run in environments of their own, laid over this one: their packages in front,
# its torch and vLLM below. flash-attn is built without its kernels. SkyRL gives pydantic typing's TypedDict, which it takes
# from Python 3.12 on.
CUDA_FRAMEWORKS := swift verl openrlhf skyrl gptq
$(CUDA_VENV)-openrlhf/.ready $(CUDA_VENV)-skyrl/.ready: export FLASH_ATTENTION_SKIP_CUDA_BUILD := TRUE
$(CUDA_VENV)-openrlhf/.ready $(CUDA_VENV)-skyrl/.ready: export FLASH_ATTENTION_FORCE_BUILD := TRUE
$(CUDA_VENV)-skyrl/.ready: AT_START := import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict
cuda-frameworks: $(CUDA_FRAMEWORKS:%=$(CUDA_VENV)-%/.ready)

bench-emulated-frameworks: $(READY) cuda-frameworks
	$(BIN)/python benchmarks/emulated_frameworks.py --environments $(OVERLAYS)

bench-emulated-lengths: $(READY) $(CUDA_VENV)-swift/.ready
	$(BIN)/python benchmarks/emulated_lengths.py --environments $(OVERLAYS)

bench-recorded-steps: $(READY) cuda-frameworks
	$(BIN)/python benchmarks/recorded_steps.py --environments $(OVERLAYS)

# Two of examples/ were reported with torch 2.5.1: whole environments, with flash-attn, again without its kernels, after torch,
# which its build imports. Open-Reasoner-Zero is on no package index: its test needs a clone in .venvs/frameworks/orz/repo.
CUDA_REPORTS := swift orz
$(OVERLAYS)/report-orz/.ready: export FLASH_ATTENTION_SKIP_CUDA_BUILD := TRUE
$(OVERLAYS)/report-orz/.ready: export FLASH_ATTENTION_FORCE_BUILD := TRUE
cuda-reports: $(CUDA_REPORTS:%=$(OVERLAYS)/report-%/.ready)

$(OVERLAYS)/report-%/.ready: .ci/constraints/report-%.txt .ci/constraints/build.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	for file in .ci/constraints/build.txt $< $(wildcard .ci/constraints/report-$*-after.txt); do \
	  DS_BUILD_OPS=0 $(PINNED:$(BIN)/%=$(@D)/bin/%) "$$file"; \
	done
	touch $@

.SECONDEXPANSION:
$(CUDA_VENV)-%/.ready: $$(wildcard .ci/constraints/framework-$$*.txt .ci/constraints/cuda-$$*.txt) $(READY) $(CUDA_VENV)/.ready
	$(CUDA_PYTHON) -m venv --without-pip --clear $(@D)
	site=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(CUDA_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/zz_base.pth"; \
	echo '$(AT_START)' >> "$$site/zz_base.pth"; \
	$(PINNED:--requirement=) $(addprefix --requirement ,$(filter .ci/constraints/%,$^)) --quiet --target "$$site"
	touch $@

$(CUDA_VENV)/.ready: .ci/constraints/build.txt .ci/constraints/cuda.txt pyproject.toml
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(PINNED:$(BIN)/%=$(@D)/bin/%) .ci/constraints/build.txt
	$(PINNED:$(BIN)/%=$(@D)/bin/%) .ci/constraints/cuda.txt
	$(PIP_INSTALL:$(BIN)/%=$(@D)/bin/%) --no-build-isolation --editable .
	touch $@

# TRL's settings of each method, merged over the oldest, middle and newest release; KTO is experimental in the oldest.
# Then those of the launched frameworks; Open-Reasoner-Zero's only with a clone of its repository in orz/repo.
FIELD_LIST := $(BIN)/python $(CURDIR)/.ci/list_trl_fields.py
FRAMEWORK_LIST := $(BIN)/python $(CURDIR)/.ci/list_framework_fields.py
ORZ := $(OVERLAYS)/frameworks/orz/repo
PRIME_RL := $(OVERLAYS)/frameworks/prime-rl/repo
step-models: $(READY)
	$(BIN)/python .ci/survey_step_models.py $(MODELS)

field-lists: $(READY) trl-overlays frameworks
	lists=$$(mktemp -d); \
	for method in grpo rloo sft dpo kto reward online-dpo async-grpo; do files=(); \
	  for version in $(TRL_OVERLAYS) newest; do \
	    case $$method$$version in kto1.0.0 | async-grpo1.*) continue;; esac; \
	    files+=("$$lists/$$method-$$version.json"); \
	    PYTHONPATH=$(CURDIR)/$(OVERLAYS)/trl-$$version $(FIELD_LIST) --method $$method | tail -n 1 > "$${files[-1]}"; \
	  done; \
	  $(FIELD_LIST) --merge "$${files[@]}" > autotune/frameworks/trl/fields_$$method.json; \
	done; rm -r "$$lists"
	for name in verl openrlhf skyrl; do \
	  packages=$$($(OVERLAYS)/frameworks/$$name/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  $(FRAMEWORK_LIST) $$name "$$packages" > autotune/frameworks/$${name}_fields.json; \
	done
	if [ -d $(PRIME_RL) ]; then for name in prime_rl prime_rl_sft; do \
	  $(FRAMEWORK_LIST) $$name $(PRIME_RL) > autotune/frameworks/$${name}_fields.json; done; fi
	if [ -d $(ORZ) ]; then $(FRAMEWORK_LIST) open_reasoner_zero $(ORZ) > autotune/frameworks/open_reasoner_zero_fields.json; fi

trl-overlays: $(TRL_OVERLAYS:%=$(OVERLAYS)/trl-%/.ready)

# One folder per version, put in front of the environment's own TRL by PYTHONPATH.
$(OVERLAYS)/trl-%/.ready: .ci/constraints/trl-%.txt $(READY)
	rm -rf $(@D)
	$(PINNED) $< --quiet --target $(@D)
	touch $@

frameworks: $(FRAMEWORKS:%=$(OVERLAYS)/frameworks/%/.ready)

# A virtual environment whose own packages stand in front of .venv's, so that torch is not installed five times.
$(OVERLAYS)/frameworks/%/.ready: .ci/constraints/framework-%.txt $(READY)
	$(BIN)/python -m venv --without-pip --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
	$(PINNED) $< --quiet \
	  --target "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(DEMO_MODEL)/config.json: $(READY) autotune/worker/synthetic.py
	rm -rf $(@D)
	mkdir -p $(dir $(@D))
	$(BIN)/python autotune/worker/synthetic.py $(@D) $(DEMO_SHAPE)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OVERLAYS) .demo $(DEMO_OUT) build dist

PIP_INSTALL := $(BIN)/python -m pip install --no-deps
# What is listed with the hashes of its files, and nothing else. Sources are built with the setuptools of build.txt.
PINNED := $(PIP_INSTALL) --no-build-isolation --require-hashes --requirement
CPU_INDEX := https://download.pytorch.org/whl/cpu

# torch comes from the configured index where that has its CPU build. The Python Package Index has CUDA builds only,
# under another version than the pinned one: there the first try ends at once, and PyTorch's index is asked instead, for
# this package alone.
$(READY): pyproject.toml .ci/constraints/build.txt .ci/constraints/cpu.txt .ci/constraints/torch-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed and $(PYTHON) is older: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PINNED) .ci/constraints/build.txt
	$(PINNED) .ci/constraints/cpu.txt
	$(PIP_INSTALL) --requirement .ci/constraints/torch-cpu.txt \
	  || $(PIP_INSTALL) --index-url $(CPU_INDEX) --requirement .ci/constraints/torch-cpu.txt
	$(PIP_INSTALL) --no-build-isolation --editable .
	touch $@
