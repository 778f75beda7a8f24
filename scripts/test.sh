#!/usr/bin/env bash
# Lint, types and tests. --slow includes the slow tests; other arguments go to pytest: scripts/test.sh tests/unit -k masking
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"
install_requirements requirements-dev.txt

selection=(-m "not slow")
if [ "${1:-}" = --slow ]; then
    selection=()
    shift
fi
ruff check .
ruff format --check .
mypy
# One worker per core: most tests use one core. Tests of a file share fixtures, so files are not split.
OMP_NUM_THREADS=1 python -m pytest -n auto --maxprocesses 4 --dist loadfile "${selection[@]}" "$@"
