#!/usr/bin/env bash
#SBATCH --job-name=bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@120
#SBATCH --requeue
# One rank per GPU under srun. Arguments are passed to the launcher: sbatch scripts/slurm.sh --cf bert_base.json …
# Two minutes before the time limit all ranks save and exit with code 75, and the job requeues itself. A requeued job runs
# the same command, so it resumes from its newest checkpoint.
set -euo pipefail
if [ $# -eq 0 ] || [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "usage: sbatch scripts/slurm.sh <flags of deepspeed_train.py>" >&2
    exit 2
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export PATH="$PWD/.venv/bin:$PATH"  # without .venv: the Python of the environment from which sbatch was called
code=0
# Ranks end a moment apart. With --kill-on-bad-exit srun would kill the last ones for the 75 of the first, and return 143.
srun --kill-on-bad-exit=0 --wait=600 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python deepspeed_train.py "$@" || code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
