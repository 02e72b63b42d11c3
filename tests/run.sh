#!/usr/bin/env bash
# Sets up .venv where needed, then runs every check: ruff, mypy, and all tests, two files at a time.
# Arguments go to pytest: bash tests/run.sh tests/planner -k fold
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
pulse_setup dev
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile \
    --no-loadscope-reorder "$@"
