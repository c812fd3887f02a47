#!/usr/bin/env bash
# runs/launch.sh MACHINES GPUS FLAGS... starts train.py on every GPU; run it on each of the machines.
# Which machine this is, and where the first one is, come from Slurm's variables, or else from
# torchrun's: NODE_RANK or GROUP_RANK, MASTER_ADDR and MASTER_PORT.
# The plan is printed first, and a run that does not fit this machine's smallest card is refused.
# With --dry_run among the flags nothing else happens. The cards are $CARD (H100) then, a name in tools/cost.py, which also
# gives an estimate of the time; --card NAME takes others, and --price DOLLARS, of an hour of one GPU, adds the money.
set -euo pipefail
cd "$(dirname "$0")/.."
machines=$1
gpus=$2
shift 2
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
plan=(python tools/plan.py --machines "$machines" --gpus "$gpus")
for flag in "$@"; do
    [ "$flag" = --dry_run ] && exec "${plan[@]}" --card "${CARD:-H100}" "$@"
done

# nvidia-smi prints MiB, a line for each card; rounded to GiB that is the size as it is sold. Without a GPU it is
# absent, or says something else.
card=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null |
    sort -n | head -n 1) || true
gigabytes=80
if [[ $card =~ ^[0-9]+$ ]]; then
    gigabytes=$(((card + 512) / 1024))
fi
"${plan[@]}" --card_gb "$gigabytes" "$@"

if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${MASTER_ADDR:-}" ]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
# The launcher ignores USR1 from here on. The ranks catch it, save and leave, in their own time.
trap '' USR1
exec accelerate launch --use_deepspeed --deepspeed_multinode_launcher standard --mixed_precision no --dynamo_backend no \
    --num_machines "$machines" --num_processes $((machines * gpus)) \
    --machine_rank "${SLURM_NODEID:-${NODE_RANK:-${GROUP_RANK:-0}}}" \
    --main_process_ip "${MASTER_ADDR:-127.0.0.1}" --main_process_port "${MASTER_PORT:-29500}" \
    train.py "$@"
