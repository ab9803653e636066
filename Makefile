# make demo   makes the environment and answers a mixed batch of nine tasks with one base model
# make test   makes the environment and runs the tests
# make soak   ten minutes of random requests, adapter verbs, faults, kills and disconnects against one engine, and ten of usage (SECONDS=60, SEED=7: others)
VENV ?= .venv
SECONDS ?= 600
SEED ?= 0
FAULTS ?= weights,alloc,copy,disk

.PHONY: help demo test soak lint docs env-serve env-dev train-demo clean

help:
	@echo "make demo   run the main job: eleven adapters and the base model in one batch"
	@echo "make test   run the tests (20 to 50 minutes on 2 cores)"
	@echo "make soak   ten minutes of random requests, loads, faults, kills and disconnects, every answer compared, then usage (SECONDS, SEED, FAULTS)"
	@echo "make lint   style and types"
	@echo "make docs   the documentation site in site/"
	@echo "make train-demo   train the demo model and its adapters again (under an hour on a CPU)"
	@echo "make clean  remove the environment and caches"

$(VENV)/.ready-serve: pyproject.toml constraints.txt scripts/setup
	scripts/setup $(VENV) serve

$(VENV)/.ready-dev: pyproject.toml constraints.txt scripts/setup
	scripts/setup $(VENV) dev

env-serve: $(VENV)/.ready-serve

env-dev: $(VENV)/.ready-dev

demo: env-serve
	$(VENV)/bin/loraplex demo

test: env-dev
	scripts/test $(VENV)

soak: env-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.soak --seconds $(SECONDS) --seed $(SEED) --faults $(FAULTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.soak.usage --seconds $(SECONDS) --seed $(SEED)

lint: env-dev
	scripts/lint $(VENV)

docs:
	scripts/docs

train-demo: env-dev
	$(VENV)/bin/python scripts/train_demo.py

clean:
	rm -rf $(VENV) .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
