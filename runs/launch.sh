#!/usr/bin/env bash
# runs/launch.sh MACHINES GPUS FLAGS... starts train.py on every GPU of this machine. Run it on each machine.
# The number of this machine and the address of the first machine come from Slurm's variables, or else from torchrun's
# variables: NODE_RANK or GROUP_RANK, MASTER_ADDR and MASTER_PORT.
# On a machine with GPUs the script first prints the plan of the run's memory, for the smallest card. With --dry_run it
# prints the plan alone, for cards of $CARD_GB GB (default: 80).
# The exit code is that of the rank that failed first: 2 for a wrong flag, file, folder or machine, and 1 for an error.
set -euo pipefail
cd "$(dirname "$0")/.."
machines=$1
gpus=$2
shift 2
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
plan=(python tools/plan.py --machines "$machines" --gpus "$gpus")
words=()
for word in "$@"; do
    if [ "$word" = --dry_run ]; then
        dry_run=yes
    else
        words+=("$word")
    fi
done
[ -n "${dry_run:-}" ] && exec "${plan[@]}" --card_gb "${CARD_GB:-80}" "${words[@]}"

# nvidia-smi prints one line in MiB for each card. Rounded to GiB, the number is the size of the card as it is sold.
card=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | head -n 1) || true
if [[ $card =~ ^[0-9]+$ ]]; then
    "${plan[@]}" --card_gb $(((card + 512) / 1024)) "$@"
fi

if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${MASTER_ADDR:-}" ]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
# One process needs no launcher.
[ $((machines * gpus)) = 1 ] && exec python train.py "$@"

# From here on the launcher ignores the signal USR1. The ranks catch USR1, save, and end.
trap '' USR1
exec python runs/launcher.py --use_deepspeed --deepspeed_multinode_launcher standard --mixed_precision no --dynamo_backend no \
    --num_machines "$machines" --num_processes $((machines * gpus)) \
    --machine_rank "${SLURM_NODEID:-${NODE_RANK:-${GROUP_RANK:-0}}}" \
    --main_process_ip "${MASTER_ADDR:-127.0.0.1}" --main_process_port "${MASTER_PORT:-29500}" \
    train.py "$@"
