#!/usr/bin/env bash
# Lint, types and tests. --slow includes the slow tests; --cluster runs those of several machines instead, as root on Linux;
# other arguments go to pytest: scripts/test.sh tests/unit -k masking
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"
install_requirements "requirements-$([ "${1:-}" = --cluster ] && echo cluster || echo dev).txt"

# Debian packages: two machines with ssh, the launchers, and a Slurm. A test skips, with the name, if one is missing.
CLUSTER_PACKAGES=(iproute2 openssh-server openssh-client pdsh openmpi-bin mpich munge slurmctld slurmd slurm-client)
if [ "${1:-}" = --cluster ]; then
    shift
    if [ "$(id -u)" -ne 0 ]; then
        echo "scripts/test.sh --cluster: it makes network namespaces, and needs root (run it in a container or with sudo)" >&2
        exit 2
    fi
    if ! dpkg -s "${CLUSTER_PACKAGES[@]}" > /dev/null 2>&1; then
        apt-get install -y --no-install-recommends "${CLUSTER_PACKAGES[@]}" ||
            echo "warning: apt-get cannot install ${CLUSTER_PACKAGES[*]}; tests that need a missing one are skipped" >&2
    fi
    exec python -m pytest -m cluster tests/cluster "$@"
fi
selection=(-m "not slow and not cluster")
if [ "${1:-}" = --slow ]; then
    selection=(-m "not cluster")
    shift
fi
ruff check .
ruff format --check .
mypy
# One worker per core: most tests use one core. Tests of a file share fixtures, so files are not split.
OMP_NUM_THREADS=1 python -m pytest -n auto --maxprocesses 4 --dist loadfile "${selection[@]}" "$@"
