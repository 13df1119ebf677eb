#!/usr/bin/env bash
# Install what the tests need and run them all. Arguments go to pytest: bash run_tests.sh -k resume
# Two tests at a time: most of them wait for processes to start, and few keep two cores busy. More with -n 8.
set -euo pipefail
cd "$(dirname "$0")"
source tools/environment.sh requirements-test.txt
exec python -m pytest -n 2 --dist loadscope "$@"
