#!/usr/bin/env bash
# Everything that wants a GPU, in 6 minutes: the device tests, then training steps of 100m and 1b on
# random tokens (eager and compiled, plain and lean, bf16 and fp16) as one table.
# Without a GPU the same code runs at a tiny size on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
SECONDS=0
timeout 120 python -m pytest -m device -q || status=$?
timeout $((355 - SECONDS)) python tests/benchmark.py --gpu --budget $((330 - SECONDS)) || status=$?
echo "gpu_check: $SECONDS s, exit status ${status:-0}"
exit "${status:-0}"
