# `make` lists the targets. Set-up is part of every target that needs it and is skipped when it is done.
# TORCH=..., ENGINE=..., DEEPSPEED=..., MEGATRON=..., PYTHON=... choose what set-up installs (see README.md); ARGS=... goes to the command.

PY := .venv/bin/python
INSTALL := $(PY) -m pip --disable-pip-version-check install --quiet --no-deps
FAST := not slow and not gpu and not chaos and not extras
LIGHT := $(FAST) and not ray and not vllm
# Files in order: those with long runs come first, so that no process of tests is left alone with one at the end.
# Three processes of tests for two cores: a third of the time a test waits for a process, a clock or a disk.
IN_ORDER := --dist loadfile --no-loadscope-reorder
MANY := -n 3 $(IN_ORDER)
TWO := -n 2 $(IN_ORDER)
CODE := src packages tests tools benchmarks
# Tests fetch nothing and report nothing; their OpenMP threads wait as those of a run do (roll.process_environment).
OFFLINE := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=10000

.DEFAULT_GOAL := help
# every target is a command
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(MAKEFILE_LIST))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install ROLL and everything it needs into .venv
	@scripts/setup.sh

quickstart: setup ## train: SmolLM2-135M learns to add, on this machine, in minutes
	@.venv/bin/roll train examples/quickstart.yaml $(ARGS)

example-code: setup ## train on writing small functions, scored in sandboxes (about 10 minutes)
	@.venv/bin/roll train examples/code.yaml $(ARGS)

example-reasoning: setup ## train on a reasoning-gym task (up to 30 minutes)
	@.venv/bin/roll train examples/reasoning.yaml $(ARGS)

test: setup ## the tests, without the slow, GPU and chaos ones and those of vLLM and Ray
	@$(OFFLINE) $(PY) -m pytest $(MANY) --ignore=tests/extras -m "$(LIGHT)" $(ARGS)

test-engines: setup ## the tests that start vLLM or Ray, without the slow, GPU and chaos ones
	@$(OFFLINE) $(PY) -m pytest $(TWO) --ignore=tests/extras -m "(ray or vllm) and $(FAST)" $(ARGS)

test-matrices: setup ## the cases of large matrices of which `make test` runs a few: every preset trained end to end, …
	@$(OFFLINE) $(PY) -m pytest $(TWO) -m matrix $(ARGS)

test-sandbox: setup ## the tests of the distribution roll-sandbox, without the slow and chaos ones
	@$(OFFLINE) $(PY) -m pytest $(TWO) -m "not slow and not chaos" packages/roll-sandbox/tests $(ARGS)

test-all: setup ## every test this machine can run
	@$(OFFLINE) $(PY) -m pytest -m "not wheel" $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m "not wheel" packages/roll-sandbox/tests $(ARGS)

test-gpu: setup ## the tests that need a CUDA device (two minutes; those of libraries that are not installed are skipped)
	@$(OFFLINE) $(PY) -m pytest -m gpu tests/unit/training $(ARGS)

test-wheel: setup ## build both wheels, install them into new environments, train and serve with them (3 minutes; needs a package index)
	@$(OFFLINE) TORCH="$(TORCH)" $(PY) -m pytest -m wheel tests/integration/test_wheel.py $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m wheel packages/roll-sandbox/tests/test_wheel.py $(ARGS)

test-extras: setup ## read what ROLL writes with other versions of libraries, in environments of their own (needs package indexes)
	@$(PY) tools/extras.py $(EXTRAS)
	@$(OFFLINE) $(PY) -m pytest -m extras tests/extras $(ARGS)

explore: setup ## the property tests with new random examples, which `make test` keeps fixed
	@$(OFFLINE) ROLL_SCHEDULES=600 $(PY) -m pytest $(TWO) tests/unit/rollout/test_schedules.py
	@$(OFFLINE) $(PY) -m pytest $(TWO) -m "hypothesis and $(FAST)" --hypothesis-profile=explore $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -n 2 -m "hypothesis and not slow and not chaos" --hypothesis-profile=explore packages/roll-sandbox/tests $(ARGS)

chaos: setup ## kill a run at many moments, resume it, compare with an uninterrupted one
	@$(OFFLINE) $(PY) -m pytest -m chaos $(ARGS)
	@$(OFFLINE) $(PY) -m pytest -m chaos packages/roll-sandbox/tests $(ARGS)

lint: setup ## style, types, import contracts of the rooms, size budgets
	@.venv/bin/ruff check $(CODE)
	@.venv/bin/ruff format --check $(CODE)
	@.venv/bin/pyrefly check
	@.venv/bin/lint-imports --no-cache --no-logo
	@$(PY) tools/check_size.py

format: setup ## rewrite the code in the house style
	@.venv/bin/ruff check --fix $(CODE)
	@.venv/bin/ruff format $(CODE)

bench-step: setup ## time per training step, beside TRL's GRPOTrainer
	@$(PY) benchmarks/bench_step.py $(ARGS)

gallery-post-training: setup ## what each post-training pipeline learns, three seeds: table and curves (about an hour)
	@$(PY) benchmarks/gallery_post_training.py $(ARGS)

bench-sft: setup ## trained tokens per second of SFT and DPO, beside TRL's SFTTrainer and DPOTrainer
	@$(PY) benchmarks/bench_sft.py $(ARGS)

dry-run: setup ## what models of 72B and 235B ask of every rank under eight layouts, without devices (an hour)
	@$(PY) benchmarks/dry_run.py $(ARGS)

bench-parts: setup ## trainer utilisation, weight sync, idle engine, command latency
	@$(PY) benchmarks/bench_parts.py $(ARGS)

bench-device: setup ## ceilings of the device, and the trainer's share of them: a billion random weights (on a CPU a tiny model)
	@$(PY) benchmarks/bench_device.py $(ARGS)

bench-engine: setup ## vLLM on a CPU: each of its options beside ROLL's settings (about 20 minutes, 8 GiB)
	@$(PY) benchmarks/bench_engine.py $(ARGS)

bench-memory: setup ## peak memory of each of four ranks that train a billion weights (about 5 minutes, 14 GiB)
	@$(PY) benchmarks/bench_memory.py $(ARGS)

bench-pipeline: setup ## a step of two stages, with one part of the layers or several each (about 2 minutes)
	@$(PY) benchmarks/bench_pipeline.py $(ARGS)

bench-algorithms: setup ## cost of the algorithm layer beside a training step
	@$(PY) benchmarks/bench_algorithms.py $(ARGS)

bench-rewards: setup ## mathematics: published cases, right and wrong; answers per second
	@$(PY) benchmarks/bench_rewards.py $(ARGS)

fuzz-rewards: setup ## a million hostile answers through every verifier (an hour of processor time; ARGS="--answers 20000" for a few)
	@$(PY) benchmarks/fuzz_rewards.py $(ARGS)

sweep: setup ## every algorithm on the quickstart task: a table and a plot (about 40 minutes)
	@$(PY) benchmarks/sweep.py $(ARGS)

bench-async: setup ## asynchronous training beside synchronous, with a slow reward (about 20 minutes)
	@$(PY) benchmarks/bench_async.py $(ARGS)

bench-scheduler: setup ## processor time of the scheduling itself, per rollout event
	@$(PY) benchmarks/bench_scheduler.py $(ARGS)

bench-policies: setup ## every scheduling policy on real vLLM, measured speed-ups beside simulated ones (about 15 minutes)
	@$(PY) benchmarks/bench_policies.py $(ARGS)

bench-calibration: setup ## the simulator, fitted to one real run, predicts others (about 8 minutes)
	@$(PY) benchmarks/bench_calibration.py $(ARGS)

mutation-scheduler: setup ## plants bugs in the scheduler, one at a time: random schedules must catch each
	@$(PY) benchmarks/mutation_scheduler.py $(ARGS)

mutation-algorithms: setup ## plants bugs in the numbers, one at a time: the unit tests named for each must catch it
	@$(PY) benchmarks/mutation_algorithms.py $(ARGS)

bench-simulator: setup ## the simulator: 65,536 rollouts on 3,072 GPUs in one step, and how its cost grows
	@$(PY) benchmarks/bench_simulator.py $(ARGS)

simulate-paper: setup ## published speed-ups against simulated ones, and what beats them: table and plots in docs/ (about an hour)
	@$(PY) benchmarks/simulate_paper.py $(ARGS)

sweep-multi-turn: setup ## every method with turns on the guessing game: a table and a plot (about 15 minutes)
	@$(PY) benchmarks/sweep_multi_turn.py $(ARGS)

bench-sandbox: setup ## sandboxes: start to first output, programs per second, many at once
	@$(PY) benchmarks/bench_sandbox.py $(ARGS)

bombs-sandbox: setup ## 700 fork bombs of 17 kinds in sandboxes started both ways, and over HTTP: no process is left (about 8 minutes)
	@$(OFFLINE) ROLL_BOMB_ROUNDS=6 $(PY) -m pytest packages/roll-sandbox/tests/sandbox/test_bombs.py $(ARGS)

bench-sandbox-service: setup ## sandboxes through a service: first output, starts per second, a thousand at once
	@$(PY) benchmarks/bench_sandbox_service.py $(ARGS)

fuzz-sandbox-service: setup ## 20,000 requests made from the sandbox service's OpenAPI (needs schemathesis; about an hour)
	@$(PY) tools/fuzz_sandbox_service.py $(ARGS)

bench-agentic: setup ## acting over many turns: training on rewritten histories, scheduling, the endpoint of agents
	@$(PY) benchmarks/bench_agentic.py $(ARGS)
	@$(PY) benchmarks/bench_agentic_scheduling.py
	@$(PY) benchmarks/bench_agents_endpoint.py

agentic-demo: setup ## what agentic runs learn in three environments, three seeds: table and curves (hours)
	@$(PY) benchmarks/agentic_demo.py $(ARGS)

bench-dashboard: setup ## the dashboard on a run of a million rollouts, and what watching costs (about 8 minutes, 2 GB of disk)
	@$(PY) benchmarks/bench_dashboard.py $(ARGS)

gallery: setup ## what every example learns, takes and answers: pages in docs/gallery/ (hours; ARGS="--only quickstart": minutes)
	@$(PY) benchmarks/gallery.py $(ARGS)

questions: setup ## questions to a run, answered by clicking in a real Chromium: docs/questions.md (about 5 minutes)
	@$(OFFLINE) $(PY) benchmarks/questions.py $(ARGS)

dashboard: ## rebuild the page of `roll dashboard` from dashboard/ (needs Node and npm; what it makes is committed)
	@cd dashboard && npm ci --no-audit --no-fund --silent && npm run --silent check && npm run --silent build

test-dashboard: setup ## the page of `roll dashboard` in a real Chromium (make setup CHROMIUM=apt)
	@$(OFFLINE) $(PY) -m pytest tests/dashboard $(ARGS)

docs: setup ## build the documentation into site/
	@$(INSTALL) -r requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

clean: ## remove .venv, .venv-extras and everything built; runs/ stays
	rm -rf .venv .venv-extras site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
