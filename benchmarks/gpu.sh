#!/usr/bin/env bash
# Measure a training step of 125M, 345M and 1.3B on this machine's GPU, with the packages that are there.
#   bash benchmarks/gpu.sh --rounds 5 --json figures      # arguments go to benchmarks/run.py
#   PYTHON=python3.12 PYTHONPATH=/where/deepspeed/is bash benchmarks/gpu.sh
# transformers is left out where it is missing. Exit code 2: torch or deepspeed is missing; 7: no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
for package in torch deepspeed; do
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)"; then
        echo "gpu.sh: error: $package is not installed for $python: install it, or name its folder in PYTHONPATH" >&2
        exit 2
    fi
done
exec "$python" benchmarks/run.py gpu_step "$@"
