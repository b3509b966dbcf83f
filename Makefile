# Each target first creates .venv if need be and works inside it: nothing has to be activated.
# Another Python than python3:  make demo PYTHON=python3.12. Where .venv has another one, it gets an
# environment of its own.
# Another torch than that of constraints.txt, in an environment of its own:  make test TORCH=2.15.0

PYTHON ?= python3
TORCH ?=
MNIST ?= data/mnist
MOVIELENS ?= data/ncf-ml-1m
SHAKESPEARE ?= data/shakespeare
DEVICE ?= cuda
SEED ?= 1
MINUTES ?= 10
CASES ?= 1
VERSION := -c 'import sys; print("-python-%d.%d" % sys.version_info[:2])' 2>/dev/null || echo -python-none
ifneq ($(origin PYTHON),file)  # a second line is the version of PYTHON, which is not that of .venv
OTHER := $(shell [ ! -x .venv/bin/python ] || { .venv/bin/python $(VERSION); $(PYTHON) $(VERSION); } | uniq | sed -n 2p)
endif
VENV := .venv$(OTHER)$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
# stepladder requires these, and they come from this repository.
PACKAGES := packages/slurm-lab packages/stepladder-exchange
EDITABLE := $(addprefix -e ,$(PACKAGES))

.PHONY: help venv demo test test-skipped test-slow check lint types wheels lessons site bench gpu chaos goodput fuzz mutants corpus adversary torch-tests images clean
.NOTPARALLEL:

help:
	@echo "make demo       train handwritten digits on two processes: installation included, two minutes or more"
	@echo "make test       the tests: about five minutes on two cores; TORCH=2.15.0 tests with that version of torch"
	@echo "make test-skipped  what the last make test skipped, after an installation of Slurm, sshd or chromium"
	@echo "make test-slow  those that take longer, one case of each, 25 minutes on two cores; all cases: CASES=0"
	@echo "make check      lint, types and tests, as before every change"
	@echo "make wheels     build slurm-lab and stepladder-exchange, test each alone in an empty environment, and install stepladder with them: four minutes"
	@echo "make lessons    every lesson, every exercise and every solution: about five minutes"
	@echo "make site       the documentation as a web site, in site/"
	@echo "make bench      measure, with MNIST in MNIST=$(MNIST); results in benchmarks/results"
	@echo "make gpu        on a machine with a CUDA GPU: its tests and benchmarks, without .venv, within 9 minutes"
	@echo "make chaos      kill runs at random moments, alone and racing, and compare their ends: half an hour"
	@echo "make goodput    a kill every five seconds: what still counts, beside torchrun and torchft: a quarter of an hour"
	@echo "make fuzz       odd inputs for every command and every file it reads: ten minutes; SEED=1 MINUTES=10"
	@echo "make mutants    change 300 places of the code that must not be wrong: do its tests fail? About an hour"
	@echo "make corpus     stepladder check and parity on small scripts with a planted mistake or none, all wrong answers: half an hour"
	@echo "make adversary  kinds of ordinary jobs with --sync exact, each in five ways: one hash, or refused by name? A quarter of an hour"
	@echo "make torch-tests  torch's own tests of torch.distributed, on gloo and on shared memory: twenty minutes"
	@echo "make images     build the container image, train in it, and edit a checkout in it: root, buildah, mmdebstrap"
	@echo "make clean      remove .venv and caches; runs and data stay"

venv: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml $(PACKAGES:=/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is '$$($(PYTHON) --version 2>/dev/null)', not Python 3.11 or newer." \
	    "HINT: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module. HINT: apt-get install python3-venv"; exit 2; }
	@echo "Installing into $(VENV), once. torch comes first and is the largest part."
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),grep -vE '^(torch|setuptools|triton|sympy)==' constraints.txt > $(CONSTRAINTS))
	$(PIP) 'setuptools>=77' torch$(if $(TORCH),==$(TORCH))
	@echo "The other packages follow, without a line each: this may take some minutes."
	$(PIP) -q --no-build-isolation $(EDITABLE) -e '.[recipes,parquet,http,lessons,dev,docs]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/stepladder train digits --nproc 2 --run-dir runs/demo --fresh
	@echo "The learning curves: $(BIN)/tensorboard --logdir runs/demo"

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n 4 --dist loadfile --durations=15

test-skipped: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" --skipped-before -n 4 --dist loadfile || [ $$? -eq 5 ]  # 5: none was skipped

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and not corpus" --cases $(CASES) -n 4 --durations=15 || [ $$? -eq 5 ]  # 5: no test is marked slow

check: lint types test

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

wheels: $(INSTALLED)
	bash packages/check_wheels.sh $(BIN)/python

lessons: $(INSTALLED)
	$(BIN)/python -m pytest tests/lessons -n 3

site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "To read it: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

bench: $(INSTALLED)
	$(PIP) -q -c constraints-bench.txt --no-build-isolation $(EDITABLE) -e '.[recipes,parquet,dev,bench]'
	$(PIP) -q -c constraints-bench.txt --no-deps mosaicml-streaming
	test -d $(MNIST) || $(BIN)/stepladder data get mnist --data-dir $(MNIST)
	$(BIN)/python benchmarks/step_overhead.py --write
	$(BIN)/python benchmarks/exchange.py --write
	$(BIN)/python benchmarks/growth.py --rounds 1 --write
	$(BIN)/python benchmarks/compile_gain.py --data-dir . --only mlp digits --write  # the others want more data
	$(BIN)/python benchmarks/mnist_time_to_99.py --data-dir $(MNIST) --write
	$(BIN)/python benchmarks/shards.py --data-dir $(MNIST) --rounds 2 --write
	$(BIN)/python benchmarks/table.py --write

gpu:  # with the machine's own Python and torch: PYTHON=python3, PART=step for one part, DEVICE=cpu to rehearse
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/packages/slurm-lab/src:$(CURDIR)/packages/stepladder-exchange/src" $(PYTHON) benchmarks/gpu.py --mnist "$(MNIST)" --movielens "$(MOVIELENS)" \
	  --shakespeare "$(SHAKESPEARE)" \
	  --device $(DEVICE) $(if $(PART),--part $(PART))

chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py --write
	$(BIN)/python benchmarks/chaos_in_place.py --write
	$(BIN)/python benchmarks/chaos_phases.py --write
	$(BIN)/python benchmarks/race.py --write

goodput: $(INSTALLED)  # torchft sees .venv's torch, and nothing of .venv changes
	$(PYTHON) -m venv .venv/torchft
	.venv/torchft/bin/python -m pip -q install --no-deps torchft==0.2.0
	.venv/torchft/bin/python -m pip -q install opentelemetry-exporter-otlp-proto-http
	$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
	  "$$(.venv/torchft/bin/python -c 'import site; print(site.getsitepackages()[0])')/z_torch.pth"
	$(BIN)/python benchmarks/goodput.py --torchft .venv/torchft/bin --write

fuzz: $(INSTALLED)
	FUZZ_SEED=$(SEED) FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/fuzz -n 4 --timeout=0

mutants: $(INSTALLED)
	$(PIP) -q -c constraints-bench.txt --no-build-isolation $(EDITABLE) -e '.[recipes,parquet,dev,mutants]'
	$(BIN)/python benchmarks/mutants.py --write

corpus: $(INSTALLED)
	$(BIN)/python -m pytest -m corpus -n 2
	$(BIN)/python benchmarks/check_corpus.py --write
	$(BIN)/python benchmarks/parity_corpus.py --write

adversary: $(INSTALLED)
	$(BIN)/python benchmarks/adversary.py --write

torch-tests: $(INSTALLED)
	$(BIN)/python benchmarks/torch_tests.py --write

images: $(INSTALLED)
	$(BIN)/python -m pytest docker

clean:
	rm -rf .venv .venv-* build dist site src/*.egg-info packages/*/build packages/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src packages tests benchmarks docs -name __pycache__ -prune -exec rm -rf {} +
