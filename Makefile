# make demo   everything from nothing: a virtual environment, the pinned packages (9.4 GB), then the demo
# make test   the same set-up, then the whole test suite, with the real engines
# make layouts  the same set-up, then each method under each layout: the README's table, in three minutes
# make families  the same set-up, then each model family under each layout, in eight minutes
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test layouts families setup
demo: setup
	$(VENV)/bin/python train.py configs/demo_cpu.py

test: setup
	$(VENV)/bin/python -m pytest -q -x --durations=15 tests

layouts: setup
	$(VENV)/bin/python -m pytest -q -s tests/test_layouts.py

families: setup
	$(VENV)/bin/python -m pytest -q -s tests/test_families.py

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
	  f"Python {v[0]}.{v[1]} found; nanoslime needs 3.11 or 3.12: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing about 9.4 GB into $(VENV); 3 to 10 minutes"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
