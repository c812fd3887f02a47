#!/usr/bin/env bash
# This recipe trains ORZ 0.5B on one card of 24 GB, with short rows and a small KV cache. GRPO needs no second model as critic.
# Memory (planned, never run): rollout 16, policy 14, sync 16 of 24 GiB.
# Time (planned, never run): 76.0 s a step, 2.1 h for 100 steps on 1 x 4090.
# This recipe only tests that the run works at these sizes. ORZ has published no run of these sizes.
export CARD=4090
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_0p5b_24gb --estimator grpo --zero_stage 2 \
    --rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 3072 --max_len 4096 --packing_max_len 4096 \
    --prompt_max_len 1024 --gpu_memory_utilization 0.35 "$@"
