#!/usr/bin/env bash
# Everything that wants a GPU, in 6 minutes: the device tests, then training steps of 100m and 1b on
# random tokens (eager and compiled) as one table. What does not fit into the time is left out.
# Without a GPU the same code runs at a small size on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
SECONDS=0
timeout 120 python -m pytest -m device -q || status=$?
timeout $((355 - SECONDS)) python tests/benchmark.py --gpu || { [ $? = 124 ] || status=1; }
echo "gpu_check: $SECONDS s, exit status ${status:-0}"
exit "${status:-0}"
