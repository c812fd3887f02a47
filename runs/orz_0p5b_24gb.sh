#!/usr/bin/env bash
# ORZ 0.5B on one card of 24 GB: short rows, a small cache, GRPO instead of a second model.
# Memory (planned, never run): rollout 16, policy 14, sync 16 of 24 GiB.
# Time (planned, never run): 76.0 s a step, 2.1 h for 100 steps on 1 x 4090.
# Expect: a trial of the machinery; ORZ has no run of these sizes, nor has anybody here.
export CARD=4090
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_0p5b_24gb --estimator grpo --zero_stage 2 \
    --rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 3072 --max_len 4096 --packing_max_len 4096 \
    --prompt_max_len 1024 --gpu_memory_utilization 0.35 "$@"
