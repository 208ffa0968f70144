# Everything works from a fresh checkout with nothing else done: the environment is made on demand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
ifndef RUN
RUN := outputs/$(shell date +%Y-%m-%d/%H-%M-%S)
endif

.PHONY: train test lint faults soak clean
.DEFAULT_GOAL := test

# The pins were resolved on Python 3.11 and, with markers, on 3.10. torch comes first and alone, so that nothing else picks its build.
$(STAMP): requirements-torch.txt requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

train: $(STAMP)
	$(BIN)/python -m edgc_ddp.train +experiment=default hydra.run.dir=$(RUN)
	$(BIN)/python -m edgc_ddp.report $(RUN)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2

# Apart from the rest, since these wait for processes to die and need a quiet machine.
faults: $(STAMP)
	$(BIN)/python -m pytest -m faults tests

# Minutes: random models, one long run with faults injected, very long skewed data, many ranks on few cores.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --examples 40 --steps 10000
	$(BIN)/python tests/reliability/skewed.py --steps 100000
	$(BIN)/python tests/reliability/crowd.py --world 8 --steps 60

clean:
	rm -rf $(VENV) build dist outputs multirun compare .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
