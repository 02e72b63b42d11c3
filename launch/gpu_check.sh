#!/usr/bin/env bash
# Checks this machine's GPU with every test and benchmark here: function, accuracy, speed. Writes
# one report (report.md and report.json); each check has its own time limit. Without a GPU, checks
# that need none run on CPU over gloo; the others are skipped with the reason.
#
#   bash launch/gpu_check.sh                              all, into runs/gpu_check
#   bash launch/gpu_check.sh --list                       lists the checks without running them
#   bash launch/gpu_check.sh --only versions families     selected checks
#   bash launch/gpu_check.sh --help                       all options
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
pulse_setup dev
exec .venv/bin/python -m tests.gpu_check "$@"
