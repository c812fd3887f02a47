#!/usr/bin/env bash
# ORZ 0.5B, whole, on one card of 16 GB of Ampere or newer (A4000, 4080): older ones lack bf16. Short rows, GRPO.
# Memory (planned, never run): rollout 13, policy 14, sync 13 of 16 GiB.
# Time (planned, never run): 86.3 s a step, 2.4 h for 100 steps on 1 x A4000.
# Expect: a trial of the machinery; ORZ has no run of these sizes, nor has anybody here.
export CARD=A4000
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_0p5b_16gb --estimator grpo --zero_stage 2 \
    --rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 1536 --max_len 2048 --packing_max_len 4096 \
    --prompt_max_len 512 --micro_rollout_batch_size 64 --gpu_memory_utilization 0.3 "$@"
