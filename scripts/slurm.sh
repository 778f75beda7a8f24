#!/usr/bin/env bash
#SBATCH --job-name=bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --requeue
# One rank a GPU under srun. The words after it go to the launcher: sbatch scripts/slurm.sh --cf bert_base.json …
# A requeued job is the same command run again, so it goes on from its newest checkpoint.
set -euo pipefail
if [ $# -eq 0 ] || [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "usage: sbatch scripts/slurm.sh <flags of deepspeed_train.py>" >&2
    exit 2
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
srun --kill-on-bad-exit=1 .venv/bin/python deepspeed_train.py "$@"
