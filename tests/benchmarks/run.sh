#!/usr/bin/env bash
# Measures the claim: see tests/benchmarks/headline.py. Needs root and iproute2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python}
if ! command -v tc >/dev/null; then
    echo "iproute2 is missing: apt-get install iproute2" >&2
    exit 1
fi
exec "$python" -m tests.benchmarks.headline "$@"
