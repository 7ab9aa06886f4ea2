PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check

venv: $(VENV)/.requirements

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: setup.cfg pyproject.toml tools/requirements.py | $(VENV)/bin/python
	$(PY) tools/requirements.py secure cli examples test dev > $@.txt
	$(PIP) --upgrade pip -r $@.txt
	touch $@

.PHONY: venv
