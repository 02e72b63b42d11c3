#!/usr/bin/env bash
# Checks this machine's GPU with everything here: whether it runs, gives the right numbers, and how
# fast. One report (report.md and report.json), each check with a time limit of its own. Without a
# GPU what needs none runs on CPU over gloo, and the rest is skipped with the reason.
#
#   bash launch/gpu_check.sh                              all, into runs/gpu_check
#   bash launch/gpu_check.sh --list                       what there is, without running it
#   bash launch/gpu_check.sh --only versions families     some of them
#   bash launch/gpu_check.sh --help                       all options
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
pulse_setup dev
exec .venv/bin/python -m tests.gpu_check "$@"
