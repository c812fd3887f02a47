#!/usr/bin/env bash
# This script trains all weights of ORZ 0.5B by GRPO, with short rows, on one card of 16 GB (A4000, 4080). The card must be
# Ampere or newer, because older cards lack bf16.
# Its sizes are planned and were not run. ORZ has published no run of these sizes.
export CARD_GB="${CARD_GB:-16}"
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_0p5b_16gb --estimator grpo --skip_flat true --zero_stage 2 \
    --rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 1536 --max_len 2048 --packing_max_len 4096 \
    --prompt_max_len 512 --micro_rollout_batch_size 64 --gpu_memory_utilization 0.3 "$@"
