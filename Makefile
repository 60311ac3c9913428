# One verb per task; CI runs the same ones. Beforehand a machine needs Python 3.11 or newer, git, make and a C compiler:
# every verb makes what else it needs, in a virtual environment of its own.
#
#   VENV=DIR      another place for the environment          PYTHON=/path/to/python3   another interpreter for it
#   EXTRA="..."   further requirements for the environment   PYTEST_ARGS="..."         further arguments for pytest
#   LIMIT=5400    seconds that a run of make test may take

.ONESHELL:
.SHELLFLAGS = -euc
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu test-all test-engines soak mutants journeys lint format types imports bench clean

# With it set, each of the hundreds of processes of a run compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
PYTHON ?=
EXTRA ?=
PYTEST_ARGS ?=
STANDIN_ARGS ?=
# Seconds after which a run of tests is ended, with a summary: see tests/watchdog.py. It is there for hangs, so it holds
# on a machine many times slower; what does not end even then is killed.
LIMIT ?= 5400
limited = VRAM_TEST_LIMIT=$(1) timeout --foreground --kill-after=60 $$(($(1) + 300))

bin := $(VENV)/bin
stamp := $(VENV)/.made

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r verb what; do
		printf '  make %-10s %s\n' "$$verb" "$$what"
	done

venv: $(stamp) ## make the virtual environment; again when pyproject.toml has changed

# An interpreter must be new enough and able to make an environment. A name in PATH may be a shim that only
# complains, so each candidate is tried rather than looked up.
$(stamp): pyproject.toml
	@found=; seen=
	for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python3.14 python "$$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do
		if [ -z "$$python" ] || ! version=$$("$$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
			[ -z "$$python" ] || [ "$$python" != "$(PYTHON)" ] || { echo "PYTHON=$$python does not run" >&2; exit 1; }
			continue
		fi
		if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
			seen="$$seen $$python is $$version, which is too old;"
		elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
			seen="$$seen $$python ($$version) lacks venv or ensurepip (on Debian: apt install python3-venv);"
		else
			found=$$python
			break
		fi
		[ "$$python" != "$(PYTHON)" ] || break
	done
	if [ -z "$$found" ]; then
		echo "vram needs Python 3.11 or newer with venv and ensurepip, and found none:$${seen:- no python3 in PATH}" >&2
		exit 1
	fi
	echo "making $(VENV) with $$found ($$version)"
	"$$found" -m venv --clear "$(VENV)"
	"$(bin)/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	"$(bin)/python" -m pip install -q --disable-pip-version-check -e . --group dev $(EXTRA)
	touch $@

demo: $(stamp) ## the whole job in front of your eyes: publish, crash, attach, grow, replace
	@"$(bin)/vram" demo

# What selects tests, so that the rest of the suite does not run.
selects = $(filter-out --junitxml%,$(PYTEST_ARGS))
# Three workers for two cores, since tests wait for a third of their time. The stand-in's own tests count contexts and
# lose devices for good, so they have a process to themselves (and are left out where PYTEST_ARGS selects something).
test: $(stamp) ## every suite, the slow forms left out: 5 to 6 minutes on two cores
	@HYPOTHESIS_PROFILE=ci $(call limited,$(LIMIT)) "$(bin)/python" -m pytest -n 3 --dist loadfile \
		-m "not slow and not gpu" --ignore=tests/standin $(if $(selects),,--ceilings) $(PYTEST_ARGS)
	[ -n "$(selects)" ] ||
		$(call limited,$(LIMIT)) "$(bin)/python" -m pytest $(STANDIN_ARGS) tests/standin

# By hand, on a machine with GPUs whose Python has what vram needs, pytest, hypothesis and cuda-bindings (and torch, cupy,
# jax, numba for the tests that need them): no environment is made, since those come with the machine. Multicast stays off.
GPU_PYTHON ?= python3
test-gpu: ## the tests marked gpu on the GPUs of this machine, in 15 minutes at most
	@export VRAM_TEST_GPU=1 VRAM_MULTICAST=off NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
	export VRAM_TEST_LIMIT=850 PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"
	timeout --foreground --kill-after=15 900 $(GPU_PYTHON) -m pytest -m gpu -p no:cacheprovider $(PYTEST_ARGS)

# With HYPOTHESIS_PROFILE=fuzz, 2,000 random examples with new seeds instead of 50 with the same ones.
PART ?=
ALL_LIMIT ?= 14400
test-all: $(stamp) ## every suite with its slow forms, whole, in 50 minutes (PART=3/20: a twentieth of it, in 1 to 5)
	@export VRAM_TEST_ALL=1 HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-ci}"
	$(call limited,$(ALL_LIMIT)) "$(bin)/python" -m pytest -n 3 --dist worksteal -m "not gpu" --ignore=tests/standin $(if $(PART),--part $(PART)) $(PYTEST_ARGS)
	[ -n "$(PART)$(selects)" ] || $(call limited,$(LIMIT)) "$(bin)/python" -m pytest $(STANDIN_ARGS) tests/standin

# At most so long; it ends before, when all is done.
SOAK_MINUTES ?= 60
soak: $(stamp) ## ten million hand-overs and a million attaches: what grows from the warm-up on fails (SOAK_MINUTES=60)
	@"$(bin)/python" tests/soak/run.py --minutes "$(SOAK_MINUTES)"

# Ends after so many; CRASH_ARGS="--seed N" does what a run that failed did.
CRASH_KILLS ?= 1000
CRASH_ARGS ?=
.PHONY: crash
crash: $(stamp) ## kill keepers and their guardians at random under load: nothing is lost (CRASH_KILLS=1000)
	@"$(bin)/python" tests/crash/run.py --kills "$(CRASH_KILLS)" $(CRASH_ARGS)

# A Python that has torch with CUDA, and where torch_memory_saver's own tests are: its wheel has none.
ENGINE_PYTHON ?= $(bin)/python
TMS_TESTS ?=
test-engines: $(stamp) ## run engines' own tests against the adapters (TMS_TESTS=torch_memory_saver/test); not part of CI
	@"$(bin)/python" -m pip install -q --disable-pip-version-check --no-deps --upgrade \
		--target $(ENGINES)/torch_memory_saver torch_memory_saver==0.0.10
	"$(ENGINE_PYTHON)" tests/engines/run.py torch_memory_saver --package $(ENGINES)/torch_memory_saver \
		$(if $(TMS_TESTS),--tests "$(TMS_TESTS)")

# An environment of its own: what makes a site is nothing that tests need.
SITE_VENV ?= .venv-docs
# Not by its option -q, with which it counts no warning.
site := NO_MKDOCS_2_WARNING=1 "$(SITE_VENV)/bin/mkdocs" build
.PHONY: docs test-site
docs: $(SITE_VENV)/.made ## make the site, strictly: a dead link, or a name without its docstring, fails (build/site)
	@said=$$($(site) 2>&1) || { echo "$$said"; exit 1; }
	echo "build/site/index.html"

$(SITE_VENV)/.made: pyproject.toml $(stamp)
	@"$(bin)/python" -m venv --clear "$(SITE_VENV)"
	"$(SITE_VENV)/bin/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	"$(SITE_VENV)/bin/python" -m pip install -q --disable-pip-version-check --group site
	touch $@

BROWSER ?= chromium
test-site: docs ## the site and maps in a browser: links, search, drawings, narrow screens (BROWSER=chromium); not part of CI
	@VRAM_BROWSER="$$(command -v "$(BROWSER)")" VRAM_PYTHON="$(abspath $(bin)/python)" "$(SITE_VENV)/bin/python" -m pytest -p no:cacheprovider \
		--rootdir tests/site --confcutdir tests/site -q tests/site

# Also an environment of its own.
RELEASE_VENV ?= .venv-release
RELEASE_ARGS ?=
.PHONY: release-check
release-check: $(RELEASE_VENV)/.made ## build what would be published, and use it in empty environments of three Pythons
	@"$(RELEASE_VENV)/bin/python" .ci/release.py $(RELEASE_ARGS)

$(RELEASE_VENV)/.made: pyproject.toml $(stamp)
	@"$(bin)/python" -m venv --clear "$(RELEASE_VENV)"
	"$(RELEASE_VENV)/bin/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	"$(RELEASE_VENV)/bin/python" -m pip install -q --disable-pip-version-check --group release
	touch $@

# In an environment of its own, on a copy of the tree: hours. [tool.mutmut] in pyproject.toml says which modules.
MUTANTS_VENV ?= .venv-mutants
mutants: $(stamp) ## change six modules, one operator at a time: which changes do their unit tests not see? (by hand)
	@[ -x "$(MUTANTS_VENV)/bin/mutmut" ] || $(MAKE) --no-print-directory venv VENV="$(MUTANTS_VENV)" EXTRA=mutmut==3.8.1
	mkdir -p build
	PATH="$(abspath $(MUTANTS_VENV)/bin):$$PATH" mutmut run --max-children 2 >build/mutants.log
	"$(MUTANTS_VENV)/bin/mutmut" results

JOURNEYS_ARGS ?=
journeys: $(stamp) ## count the calls, files and round trips of each operation (JOURNEYS_ARGS=--calls names the calls)
	@"$(bin)/python" tests/architecture/journeys.py $(JOURNEYS_ARGS)

# Servers of vLLM and SGLang on this machine's CPU, each from an environment that is made first (3 GB each, below ENGINES)
# by a Python of 3.11 or newer; tests/engines/environments.py says where the CPU build of torch comes from. KVCACHED is a
# checkout of kvcached; tests/engines/check.py says what ADAPTER_PYTHON needs for it.
ENGINES ?= .cache/engines
ADAPTERS ?= vllm sglang
KVCACHED ?=
ADAPTER_PYTHON ?= python3
.PHONY: test-adapters
test-adapters: ## serve with real vLLM and SGLang on the CPU, with the adapters (ADAPTERS=vllm KVCACHED=DIR); not part of CI
	@for engine in $(ADAPTERS); do
		"$(ADAPTER_PYTHON)" tests/engines/environments.py "$$engine" "$(ENGINES)/$$engine"
		"$(ENGINES)/$$engine/bin/python" tests/engines/check.py "$$engine"
	done
	[ -z "$(KVCACHED)" ] || "$(ADAPTER_PYTHON)" tests/engines/check.py kvcached --package "$(KVCACHED)"

# An environment of its own. NIXL's package asks for torch and for two CUDA releases: it is
# installed without. With NODES_TORCH=torch==2.13.0 tensors are passed, too.
NODES_VENV ?= .venv-nodes
NODES_TORCH ?=
nodes_needs := pytest numpy ml_dtypes msgspec safetensors typer rich xxhash zstandard
.PHONY: test-nodes
test-nodes: $(NODES_VENV)/.made ## Ray and NIXL as they are published, with the adapters: loopback only; not part of CI
	@"$(NODES_VENV)/bin/python" tests/engines/check.py nixl
	"$(NODES_VENV)/bin/python" tests/engines/check.py ray

$(NODES_VENV)/.made: pyproject.toml $(stamp)
	@"$(bin)/python" -m venv --clear "$(NODES_VENV)"
	"$(NODES_VENV)/bin/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	"$(NODES_VENV)/bin/python" -m pip install -q --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu13==1.5.1 -e .
	"$(NODES_VENV)/bin/python" -m pip install -q --disable-pip-version-check ray==2.60.0 $(nodes_needs) $(NODES_TORCH)
	touch $@

lint: $(stamp) ## style and format
	@"$(bin)/ruff" check src tests benchmarks .ci examples
	"$(bin)/ruff" format --check src tests benchmarks .ci examples

format: $(stamp) ## put the format right
	@"$(bin)/ruff" check --fix --select I src tests benchmarks .ci examples
	"$(bin)/ruff" format src tests benchmarks .ci examples

types: $(stamp) ## mypy, strict
	@"$(bin)/mypy"

imports: $(stamp) ## the import contract between the rooms
	@"$(bin)/lint-imports" --no-cache --no-logo

bench: $(stamp) ## measure against the rivals, side by side
	@"$(bin)/python" -m benchmarks

clean: ## remove everything that make has made
	@rm -rf .venv .venv-* build dist .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
