# Needs make and Python 3.10 or newer; everything else goes into .venv. `make help` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help demo test tested checked builds fuzz lint format docs schema plots pictures bench bench-compare sanitize grid cells products replay carry clean

PYTHON ?= python3
VENV ?= .venv
BASE ?= HEAD
QUICK ?=
OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
export KREG_NEWEST_TRITON ?= $(abspath $(VENV))/triton-newest

PY := $(VENV)/bin/python
# Python compiles what is imported, which is a part of what is installed.
INSTALL := $(PY) -m pip --disable-pip-version-check --quiet install --no-compile
INPUTS := pyproject.toml constraints.txt Makefile

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo: $(VENV)/.installed ## attention and matmul on this machine, what would run on an H100, and a refusal
	$(PY) examples/demo.py

test: $(PY) ## lint, type checks and all tests
	@$(MAKE) --no-print-directory -j3 checked tested
	$(PY) -m pytest benchmarks/test_dispatch_overhead.py

# What compilers make of our kernels is known of two Tritons. A torch built for GPUs may bring another: then the tests
# find the oldest before it.
tested: $(VENV)/.installed-dev $(VENV)/.imported $(KREG_NEWEST_TRITON)/.installed $(VENV)/triton-oldest/.installed
	PYTHONPATH=$(abspath $(VENV))/triton-oldest$${PYTHONPATH:+:$$PYTHONPATH} $(PY) -m pytest -n auto --dist worksteal

checked: $(VENV)/.installed-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

builds: $(VENV)/.installed-dev $(KREG_NEWEST_TRITON)/.installed $(VENV)/triton-oldest/.installed ## after a kernel changed: compile it, and keep what came of it in tests/builds
	PYTHONPATH=$(abspath $(VENV))/triton-oldest$${PYTHONPATH:+:$$PYTHONPATH} $(PY) -m pytest tests --keep-builds -n auto --dist worksteal

fuzz: $(VENV)/.installed-dev ## look for longer than `make test` does for inputs that break a promise of docs/trust.md
	$(PY) -m pytest tests/fuzz --hypothesis-profile=long -n auto --dist worksteal

lint: checked ## ruff, mypy, dispatch tables, generated files
	$(PY) -m registry.cli tables lint
	$(PY) -m registry.cli schema --check dispatch_tables
	$(PY) tools/docs.py --check

format: $(VENV)/.installed-dev ## let ruff lay out the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.installed ## write docs/variants.md, contracts in docs/authors.md and the outputs shown in README.md anew
	$(PY) tools/docs.py

schema: $(VENV)/.installed ## write the JSON Schemas of the tables anew
	$(PY) -m registry.cli schema --write dispatch_tables

plots: $(VENV)/.installed-dev ## draw the plots, and write the tables of results in README.md and docs, from benchmarks/results
	$(PY) benchmarks/plots.py

pictures: $(VENV)/.installed-dev ## draw the roofline and the warp timelines of README and docs/learn.md anew
	$(PY) tools/pictures.py
	$(PY) docs/figures/attention_tiles.py

bench: $(VENV)/.installed-dev ## time every variant on this machine and keep the figures
	$(PY) -m pytest benchmarks --benchmark-autosave

bench-compare: $(VENV)/.installed-dev ## time again, and fail where a variant got more than 5% slower than when kept
	$(PY) -m pytest benchmarks --benchmark-compare --benchmark-compare-fail=median:5%

sanitize: $(VENV)/.installed-dev ## our kernels under compute-sanitizer: memcheck and racecheck, on this machine's GPU
	$(PY) tests/gpu/sanitize.py

grid: $(VENV)/.installed-dev ## FlashAttention's own test grid over our attention and its gradients, on this machine's GPU
	$(PY) tests/gpu/flash_grid.py

cells: $(VENV)/.installed-dev ## attention beside cuDNN, FlashAttention-3 and -4 (where benchmarks/peers.py finds them), cell by cell
	$(PY) benchmarks/measure_cells.py benchmarks/results/new

products: $(VENV)/.installed-dev ## products beside cuBLAS, and quack and DeepGEMM where PEERS_SITE has them, cell by cell
	$(PY) benchmarks/measure_products.py benchmarks/results/new

# Empty where it is what torch runs with.
$(VENV)/triton-oldest/.installed: Makefile | $(VENV)/.installed
	@mkdir -p $(@D)
	$(PY) -c 'import sys, triton; sys.exit(triton.__version__ != "$(OLDEST_TRITON)")' || \
		$(if $(filter Linux,$(shell uname -s)),$(INSTALL) --no-deps --upgrade --target $(@D) triton==$(OLDEST_TRITON),true)
	@touch $@

replay: $(VENV)/.installed ## does the working tree decide, compile and call as commit BASE does (QUICK=--quick: a sample)
	$(PY) tools/replay.py $(BASE) $(QUICK)

carry: $(VENV)/.installed ## give measurements the hash of sources that changed since commit BASE and still run the same
	$(PY) tools/carry.py $(BASE)

clean: ## remove what was installed and built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("kernel-registry needs Python 3.10 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# A torch built for GPUs demands the triton that it was built with. Beside one for CPUs we take the oldest we support.
TRITON := import importlib.metadata as m, sys; \
	brought = any(r.startswith('triton') for r in m.requires('torch')); \
	print('' if brought or sys.platform != 'linux' else 'triton==$(OLDEST_TRITON)')

# In steps: while one core looks at types, which takes no more than what our package imports, the other installs the rest
# and begins with the tests.
$(VENV)/.installed: $(INPUTS) | $(PY)
	$(INSTALL) -c constraints.txt torch numpy setuptools
	$(INSTALL) -c constraints.txt --no-build-isolation -e . $$($(PY) -c "$(TRITON)")
	@touch $@

# What tests import is compiled once, while pip waits for the disk, and not in each of their processes at once.
$(VENV)/.imported: $(VENV)/.installed
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import torch._inductor.compile_fx, torch.nn.attention.flex_attention, torch.export'
	@$(PY) -m compileall -q registry plugins benchmarks tools tests/support
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(INSTALL) -c constraints.txt ruff mypy pytest types-pyyaml vl-convert-python
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-lint
	$(INSTALL) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# The other end of the range of tritons, for tests that compile without a GPU, each in a process of its own. It is not
# made for Python 3.10.
$(KREG_NEWEST_TRITON)/.installed: Makefile | $(PY)
	@mkdir -p $(@D)
	$(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 11))' || \
		$(if $(filter Linux,$(shell uname -s)),$(INSTALL) --no-deps --upgrade --target $(@D) triton==$(NEWEST_TRITON),true)
	@touch $@
