#!/usr/bin/env bash
# runs/launch.sh MACHINES GPUS FLAGS...: train.py on every GPU of every machine; run it on each of them.
# Which machine this is and where the first one is come from the usual variables: Slurm's, else torchrun's names
# (NODE_RANK or GROUP_RANK, MASTER_ADDR, MASTER_PORT). With --dry_run among the flags it only prints the plan, for cards
# of CARD_GB (80).
set -euo pipefail
cd "$(dirname "$0")/.."
machines=$1 gpus=$2
shift 2
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
for flag in "$@"; do
    [ "$flag" = --dry_run ] && exec python tools/plan.py --machines "$machines" --gpus "$gpus" --card_gb "${CARD_GB:-80}" "$@"
done
if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${MASTER_ADDR:-}" ]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
trap '' USR1  # ignored from here on by the launcher; the ranks catch it, save and leave, with no 30 s to do it in
exec accelerate launch --use_deepspeed --deepspeed_multinode_launcher standard --mixed_precision no --dynamo_backend no \
    --num_machines "$machines" --num_processes $((machines * gpus)) \
    --machine_rank "${SLURM_NODEID:-${NODE_RANK:-${GROUP_RANK:-0}}}" \
    --main_process_ip "${MASTER_ADDR:-127.0.0.1}" --main_process_port "${MASTER_PORT:-29500}" \
    train.py "$@"
