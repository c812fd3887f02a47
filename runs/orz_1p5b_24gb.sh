#!/usr/bin/env bash
# This script trains all weights of ORZ 1.5B on one card of 24 GB. DeepSpeed keeps the masters and the moments in 32 GiB of CPU
# memory, so the machine needs 40 GB.
# Its sizes are planned and were not run. ORZ has published no run of these sizes.
export CARD_GB="${CARD_GB:-24}"
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-1.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_1p5b_24gb --estimator grpo --skip_flat true --zero_stage 2 --offload optimizer \
    --rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 3072 --max_len 4096 --packing_max_len 16384 \
    --prompt_max_len 1024 --micro_rollout_batch_size 128 --gpu_memory_utilization 0.5 "$@"
