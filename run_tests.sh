#!/usr/bin/env bash
# Install what the tests need and run them all. Arguments go to pytest: bash run_tests.sh -k resume
# Two tests at a time, and more with -n 8: few keep two cores busy. Each worker takes tests that lie together and
# share what was made for them, and behind its own some of the other's.
set -euo pipefail
cd "$(dirname "$0")"
source tools/environment.sh requirements-test.txt
exec python -m pytest -n 2 --dist worksteal "$@"
