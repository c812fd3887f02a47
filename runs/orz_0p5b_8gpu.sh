#!/usr/bin/env bash
# This recipe trains ORZ 0.5B on one machine with 8 GPUs of 80 GB.
# Memory (planned, never run): rollout 60, critic 10, policy 10, sync 60 of 79 GiB.
# Time (planned, never run): 313.1 s a step, 8.7 h for 100 steps on 8 x H100.
# ORZ's report shows that reward and response length rise steadily.
exec "$(dirname "$0")/launch.sh" 1 8 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 4 --run_dir out/orz_0p5b_8gpu \
    --zero_stage 2 --gpu_memory_utilization 0.7 "$@"
