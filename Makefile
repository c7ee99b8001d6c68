# `make` lists the targets. Set-up is part of every target that needs it and is skipped when it is done.
# TORCH=..., ENGINE=..., DEEPSPEED=..., MEGATRON=..., PYTHON=... choose what set-up installs (docs/operations/install.md); ARGS=... goes to the command.

PY := .venv/bin/python
INSTALL := $(PY) -m pip --disable-pip-version-check install --quiet --no-deps
FAST := not slow and not gpu and not chaos and not extras
LIGHT := $(FAST) and not ray and not vllm
UNIT := $(LIGHT) and not integration
# Files in order: those with long runs come first, so that no process of tests is left alone with one at the end.
# Three processes of tests for two cores: a third of the time a test waits for a process, a clock or a disk.
IN_ORDER := --dist loadfile --no-loadscope-reorder
MANY := -n 3 $(IN_ORDER)
TWO := -n 2 $(IN_ORDER)
CODE := src packages tests tools benchmarks
# Tests fetch nothing, report nothing, and keep their bytecode also where the environment says not to; their OpenMP threads wait
# as those of a run do (roll.process_environment).
OFFLINE := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=10000

.DEFAULT_GOAL := help
# every target is a command
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(MAKEFILE_LIST))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install ROLL and everything it needs into .venv
	@scripts/setup.sh

quickstart: setup ## train: SmolLM2-135M learns to add, on this machine, in minutes
	@.venv/bin/roll train examples/quickstart.yaml $(ARGS)

# SUITE=fast: one part at a time. SUITE=integration: whole runs, on the embedded engine. SUITE=engines: tests of vLLM and Ray.
# SUITE=sandbox: the distribution roll-sandbox. SUITE=matrices: all cases of large matrices of which the others run a few, such
# as every preset trained end to end. SUITE=bombs: 700 fork bombs of 17 kinds, in sandboxes started both ways and over HTTP.
SUITE ?= fast
SUITE_fast := $(MANY) --ignore=tests/extras -m "$(UNIT)"
SUITE_integration := $(MANY) --ignore=tests/extras -m "integration and $(LIGHT)"
SUITE_engines := $(TWO) --ignore=tests/extras -m "(ray or vllm) and $(FAST)"
SUITE_sandbox := $(TWO) -m "not slow and not chaos" packages/roll-sandbox/tests
SUITE_matrices := $(TWO) -m matrix
SUITE_bombs := packages/roll-sandbox/tests/sandbox/test_bombs.py
test: setup ## the fast tests; SUITE=integration, engines, sandbox, matrices or bombs: others (CONTRIBUTING.md)
	$(if $(SUITE_$(SUITE)),,$(error SUITE=$(SUITE) is not known. Choose fast, integration, engines, sandbox, matrices or bombs))
	@$(OFFLINE) $(if $(filter bombs,$(SUITE)),ROLL_BOMB_ROUNDS=6) $(PY) -m pytest $(SUITE_$(SUITE)) $(ARGS)

test-all: setup ## every test this machine can run
	@$(OFFLINE) $(PY) -m pytest -m "not wheel" $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m "not wheel" packages/roll-sandbox/tests $(ARGS)

test-extras: setup ## the tests that need other versions of libraries, in environments of their own (needs package indexes)
	@$(PY) tools/extras.py $(EXTRAS)
	@$(OFFLINE) $(PY) -m pytest -m extras tests/extras $(ARGS)

test-gpu: setup ## the tests that need a CUDA device (two minutes; skips libraries that are not installed)
	@$(OFFLINE) $(PY) -m pytest -m gpu tests/unit/training $(ARGS)

test-wheel: setup ## build both wheels, install them into new environments, train and serve with them (needs a package index)
	@$(OFFLINE) TORCH="$(TORCH)" $(PY) -m pytest -m wheel tests/integration/test_wheel.py $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m wheel packages/roll-sandbox/tests/test_wheel.py $(ARGS)

test-dashboard: setup ## the page of `roll dashboard` in a real Chromium (make setup CHROMIUM=apt)
	@$(OFFLINE) $(PY) -m pytest tests/dashboard $(ARGS)

chaos: setup ## kill a run at many moments, resume it, compare with an uninterrupted one
	@$(OFFLINE) $(PY) -m pytest -m chaos $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m chaos packages/roll-sandbox/tests $(ARGS)

explore: setup ## the property tests with new random examples, which `make test` keeps fixed
	@$(OFFLINE) ROLL_SCHEDULES=600 $(PY) -m pytest $(TWO) tests/unit/rollout/test_schedules.py
	@$(OFFLINE) $(PY) -m pytest $(TWO) -m "hypothesis and $(FAST)" --hypothesis-profile=explore $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -n 2 -m "hypothesis and not slow and not chaos" --hypothesis-profile=explore packages/roll-sandbox/tests $(ARGS)

mutation: setup ## plant bugs, one at a time: the tests must catch each; NAME=algorithms or scheduler
	@for each in $(or $(NAME),algorithms scheduler); do $(PY) benchmarks/mutation_$$each.py $(ARGS) || exit 1; done

lint: setup ## style, types, import contracts, size budgets, vocabulary
	@.venv/bin/ruff check $(CODE)
	@.venv/bin/ruff format --check $(CODE)
	@.venv/bin/pyrefly check
	@.venv/bin/lint-imports --no-cache --no-logo
	@$(PY) tools/check_size.py
	@$(PY) tools/check_vocabulary.py

format: setup ## rewrite the code in the house style
	@.venv/bin/ruff check --fix $(CODE)
	@.venv/bin/ruff format $(CODE)

docs: setup ## build the documentation into site/
	@$(INSTALL) -r requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

bench: setup ## run a benchmark: NAME=step, for example; without NAME, list them
	@$(PY) benchmarks "$(NAME)" $(ARGS)

gallery: setup ## what every example learns, takes and answers (hours; ARGS="--only quickstart": minutes)
	@$(PY) benchmarks/gallery.py $(ARGS)

dashboard: ## rebuild the page of `roll dashboard` from dashboard/ (needs Node and npm; the result is committed)
	@cd dashboard && npm ci --no-audit --no-fund --silent && npm run --silent check && npm run --silent build

clean: ## remove .venv, .venv-extras and everything built; runs/ stays
	rm -rf .venv .venv-extras site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# Earlier names of targets.
bench-%: ; @$(MAKE) --no-print-directory bench NAME=$*
fuzz-% sweep-%: ; @$(MAKE) --no-print-directory bench NAME=$@
sweep dry-run questions agentic-demo simulate-paper gallery-post-training: ; @$(MAKE) --no-print-directory bench NAME=$@
mutation-%: ; @$(MAKE) --no-print-directory mutation NAME=$*
test-%: ; @$(MAKE) --no-print-directory test SUITE=$*
bombs-sandbox: ; @$(MAKE) --no-print-directory test SUITE=bombs
