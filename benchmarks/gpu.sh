#!/usr/bin/env bash
# Check and measure this machine's GPUs: one archive with a page, JSON and logs, whose path is printed last.
#   bash benchmarks/gpu.sh --quick    # --help explains it
#   PYTHON=python3.12 PYTHONPATH=/where/deepspeed/is bash benchmarks/gpu.sh
# Exit code 1: a stage failed; 2: torch or deepspeed is missing, or wrong usage; 7: no GPU, driver too old, no room.
set -euo pipefail
python=${PYTHON:-python3}
for package in torch deepspeed; do
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)"; then
        echo "gpu.sh: error: $package is not installed for $python: install it, or name its folder in PYTHONPATH" >&2
        exit 2
    fi
done
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/gpu/command.py" "$@"
