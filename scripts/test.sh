#!/usr/bin/env bash
# Lint, types and tests. --slow runs the long tests too; other words go to pytest: scripts/test.sh tests/unit -k masking
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
# Two at a time on two cores: most tests use one. Files stay whole, for what their tests share.
OMP_NUM_THREADS=1 python -m pytest -n auto --maxprocesses 4 --dist loadfile "${selection[@]}" "$@"
