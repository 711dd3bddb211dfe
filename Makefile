PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
READABLE := $(VENV)/.readable
export PATH := $(BIN):$(PATH)

WHEELS ?= .wheels
# What they predict is the same on every machine, calibrated or not.
bench gpu docs estimates: export HF_MEMOPT_CALIBRATION := off

.PHONY: help train gpu gpu-wheels test test-slow test-sweeps test-engines test-pages test-long test-all mutants bench stacks regress lint format configs estimates operators docs site picture clean

help:
	@echo "make train    set up and train the built-in model on whatever this machine has"
	@echo "make test     set up and run the tests that take seconds; minutes in all"
	@echo "make test-slow     the tests that take longer, and those that need a C++ compiler"
	@echo "make test-engines  engines on several processes and machines, some minutes"
	@echo "make test-pages    reports and documentation in a browser; needs Chromium"
	@echo "make test-long     the last three together"
	@echo "make test-all      all of them"
	@echo "make test-sweeps   what the others leave out; before a release"
	@echo "make bench    run the benchmarks; results go to benchmarks/results"
	@echo "make stacks   check other versions of the libraries, an environment each, in STACKS=../stacks"
	@echo "make mutants  change the package at random, and see which changes no test notices"
	@echo "make regress  check that predictions are what they were, to the byte; minutes"
	@echo "make gpu      measure what only a card can show; ARGS=--rehearse does without one"
	@echo "make gpu-wheels    wheels for a machine with a card and without network, into $(WHEELS)"
	@echo "make lint     check style;  make format  apply it"
	@echo "make docs     put measured, predicted and recomputed numbers into README.md and docs"
	@echo "make site     build the documentation into out/site"
	@echo "make configs  rewrite accelerate_configs/*.yaml from the presets"

# ARGS=--max_steps=20 ends it early.
train: $(INSTALLED)
	hf-memopt export auto out/setup --recipe pretrain --overwrite
	sh out/setup/launch.sh --output_dir out/pretrain --overwrite $(ARGS)

test: $(TESTABLE)
	python -m pytest

# Operators first: a test's time limit is not for compiling.
test-slow: $(TESTABLE)
	if command -v $${CXX:-c++} >/dev/null; then $(MAKE) operators OPERATORS="$(IN_MEMORY)"; fi
	python -m pytest -m "(slow or needs_compiler or needs_libaio) and not sweep and not engines and not pages and not cuda"

# What the long tests leave out: further cases of the same kind, and what takes minutes by itself. Before a release.
test-sweeps: $(READABLE)
	if command -v $${CXX:-c++} >/dev/null; then $(MAKE) operators; fi
	python -m pytest -m "sweep and not cuda"

test-engines: $(TESTABLE)
	python -m pytest -m "engines and not sweep"

test-pages: $(READABLE)
	python -m pytest -m "pages and not sweep"

# The last three in one, and a slice of the sweeps: libraries are imported once, and no core waits three more times.
test-long: $(READABLE)
	if command -v $${CXX:-c++} >/dev/null; then $(MAKE) operators OPERATORS="$(IN_MEMORY)"; fi
	python -m pytest -m "((engines or pages or slow or needs_compiler or needs_libaio) and not sweep or slice) and not cuda"

test-all: test test-long

# DeepSpeed compiles its operators at first use, which takes minutes; disk access takes as long as the others together
# twice, and needs libaio's header.
IN_MEMORY := CPUAdamBuilder ShareMemCommBuilder
OPERATORS ?= $(IN_MEMORY) AsyncIOBuilder
operators: $(INSTALLED)
	DS_ACCELERATOR=cpu python tests/operators.py $(OPERATORS)

bench: $(INSTALLED)
	python benchmarks/main_job.py
	python benchmarks/trainer_overhead.py
	python benchmarks/levers.py
	python benchmarks/video.py
	python benchmarks/planner_cpu.py
	python benchmarks/predictions.py
	python benchmarks/questions.py
	python benchmarks/refusals.py
	python benchmarks/quick_plans.py
	python benchmarks/estimator_cpu.py
	python benchmarks/estimator_model_types.py
	python benchmarks/estimator_optimizers.py
	python benchmarks/engines.py
	python benchmarks/estimator_published.py

# In a folder outside of the clone; needs uv. What results/stacks.json has is not run again (ARGS=--again).
STACKS ?= ../stacks
stacks: $(INSTALLED)
	python benchmarks/stacks.py $(STACKS) $(ARGS)

# ARGS=--freeze makes what is predicted now the truth.
regress: $(INSTALLED)
	python benchmarks/regress.py $(ARGS)

# Does not install anything: the card's machine may have no network.
gpu:
	$(if $(wildcard $(BIN)/python),python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

gpu-wheels:
	$(PYTHON) -m benchmarks.gpu.wheels $(WHEELS) $(ARGS)

# Random faults that tests should notice; ARGS="--count 200 --seed N". Minutes to hours.
mutants: $(READABLE)
	python -m pip install -qq --disable-pip-version-check pytest-cov
	python benchmarks/mutants.py $(ARGS)

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	lint-imports
	python benchmarks/statements.py

format: $(INSTALLED)
	ruff check --fix .
	ruff format .

configs: $(INSTALLED)
	python -m hf_memopt.presets.shipped_configs

estimates: $(INSTALLED)
	python -m hf_memopt.estimator.preset_estimates
	python benchmarks/video_tiers.py

docs: $(INSTALLED)
	python benchmarks/fill_docs.py

site: $(READABLE)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

picture: $(READABLE)
	python benchmarks/report_picture.py out/pretrain
	python benchmarks/plan_picture.py

clean:
	rm -rf $(VENV) out build dist *.egg-info

# Made anew when a requirement changes; otherwise nothing is installed twice.
$(INSTALLED): constraints.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hf_memopt needs Python 3.11 or later: make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), a few minutes the first time: pip collects, downloads, and then installs all at once"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Tests also need what is optional.
$(TESTABLE): $(INSTALLED)
	@echo "installing what tests need, too, a minute the first time"
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,fp8]'
	# Into a folder of its own, for tests of videos: a torchvision wheel for another torch build breaks transformers.
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
		--target $(VENV)/torchvision torchvision timm
	@touch $@

$(READABLE): $(TESTABLE)
	@echo "installing what pages need, too, a minute the first time"
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,fp8,docs,ui]'
	@touch $@
