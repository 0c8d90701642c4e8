# Every target makes or refreshes .venv when it is missing, or older than what it is made from; `serve` installs what serving
# needs, the others add the rest.
PYTHON ?= python3
MODEL  ?= gpt2-tiny
HOST   ?= 127.0.0.1
PORT   ?= 8000
ARGS   ?=
BIN    := .venv/bin
SERVE  := .venv/.serve
DEV    := .venv/.dev
IN_PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
ELSEWHERE := tests/stage02_server/test_agents.py tests/stage03_engine/test_ray_executor.py
# Nothing is byte-compiled here: Python does that with what it imports, when it imports it first, and keeps it. So it must be
# allowed to: otherwise every process would spend two seconds on compiling torch.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := PIP_NO_COMPILE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: serve test test-all venv lint bench race recordings notebooks notebooks-build slides book clean

serve: $(SERVE)  ## serve MODEL on HOST:PORT; ARGS are further flags of `serve`
	exec $(BIN)/python -m stage02_server serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(DEV)  ## every promise in its cheapest form, in a process per core and four at most; ARGS goes to pytest, e.g. "-n 0 --pdb tests/trace"
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

test-all: $(DEV)  ## the dear forms too, up to an hour, with all that npm and pip can bring; only `-m long` is left out
	$(BIN)/python tests/support/parts.py
	$(BIN)/python -m pytest $(IN_PARALLEL) --all -rs $(ARGS)
	$(BIN)/python tests/support/parts.py -m pytest --all $(ELSEWHERE)

venv: $(DEV)  ## the virtual environment for tests and tools; `make notebooks` adds JupyterLab

lint: $(DEV)  ## style and types, repairing what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

bench: $(DEV)  ## measurements, as ratios within one run, then the race; with ARGS, which go to pytest, no race
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-columns=median,iqr,rounds $(ARGS)
	$(if $(ARGS),,$(MAKE) race)

race: $(DEV)  ## ours and the other engines that are found on five workloads; ARGS goes to it, e.g. "--quick" or "--help"
	$(BIN)/python tests/benchmarks/race $(ARGS)

notebooks: .venv/.notebooks  ## JupyterLab on the first notebook; ARGS goes to it
	$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null  # else Jupyter hides the stored players until their cells run
	exec $(BIN)/jupyter lab --config=notebooks/jupyter_config.py --ServerApp.root_dir=. \
		--LabApp.default_url=/lab/tree/notebooks/00_the_whole_walk.ipynb $(ARGS)

notebooks-build: $(DEV)  ## execute the notebooks' sources and write the .ipynb files; ARGS names some of them, e.g. 00
	$(BIN)/python notebooks/build.py $(ARGS)

slides: $(DEV)  ## slides of the built notebooks, one HTML file each in notebooks/slides; ARGS names some of them, e.g. 00
	$(BIN)/python notebooks/build.py --slides $(ARGS)

book: .venv/.book  ## READMEs, notebooks, players and code as one site in build/book; ARGS goes to `stages book`, e.g. "--open"
	$(BIN)/python -m stage01_cli book $(ARGS)

recordings: $(DEV)  ## make trace/recorded/ again; ARGS are names of runs
	$(BIN)/python trace/record.py $(ARGS)

clean:  ## remove the virtual environment and everything that was generated
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) .
	touch $@

$(DEV): $(SERVE)
	$(INSTALL) '.[dev]'
	touch $@

.venv/.book: $(SERVE)
	$(INSTALL) '.[book]'
	touch $@

.venv/.notebooks: $(SERVE)
	$(INSTALL) '.[notebooks]'
	touch $@
