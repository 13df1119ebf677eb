#!/usr/bin/env bash
# Install what the tests need and run them all. Arguments go to pytest: bash run_tests.sh -k resume
set -euo pipefail
cd "$(dirname "$0")"
source tools/environment.sh requirements-test.txt
exec python -m pytest "$@"
