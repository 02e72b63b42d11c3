#!/usr/bin/env bash
# Sets up .venv where needed, then runs every check: ruff, mypy, and all tests, four files at a
# time: on two cores two wait for their processes while two compute.
# Arguments go to pytest: bash tests/run.sh tests/planner -k fold
# Slow tests, those of tests/slow.txt, run with: bash tests/run.sh --slow
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
pulse_setup dev
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
.venv/bin/mypy >"$types" 2>&1 & # beside the first tests, which wait for processes that start
mypy=$!
# Transformer Engine's sources, beside what is installed: without its libraries it cannot be imported.
engine=
if ! [ -d .venv/transformer-engine ]; then
    .venv/bin/uv pip install --quiet --no-deps --target .venv/transformer-engine \
        transformer-engine==2.20.2 einops==0.8.1 || rm -rf .venv/transformer-engine &
    engine=$!
fi
# Bytecode of all that is imported, and the compiled search: once, not by each of many processes.
if ! [ .venv/.imported -nt .venv/.installed-dev ]; then
    .venv/bin/python -c "import tests.preload" && touch .venv/.imported
fi
[ -z "$engine" ] || wait "$engine"
failed=0
.venv/bin/python -m pytest --numprocesses 4 --dist loadfile \
    --no-loadscope-reorder "$@" || failed=$?
wait "$mypy" || failed=1
cat "$types"
exit "$failed"
