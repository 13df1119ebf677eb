#!/usr/bin/env bash
# Install what the tests need and run them all: 10 to 13 minutes on two idle cores. Arguments go to pytest:
# bash run_tests.sh -k resume
# Four tests run at a time, since some of them wait most of the time; -n 8 runs more. Each worker takes neighboring
# tests, which share fixtures, and then some of another worker's.
set -euo pipefail
cd "$(dirname "$0")"
source tools/environment.sh requirements-test.txt
exec python -m pytest -n 4 --dist worksteal "$@"
