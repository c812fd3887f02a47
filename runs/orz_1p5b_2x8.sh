#!/usr/bin/env bash
# This recipe trains ORZ 1.5B on 2 machines with 8 GPUs of 80 GB each. Both machines must share the folder --run_dir.
# Memory (planned, never run): rollout 65, critic 17, policy 17, sync 65 of 79 GiB.
# Time (planned, never run): 384.6 s a step, 10.7 h for 100 steps on 16 x H100.
# ORZ's report shows that reward and response length rise steadily.
exec "$(dirname "$0")/launch.sh" 2 8 --model Qwen/Qwen2.5-1.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 4 --run_dir out/orz_1p5b_2x8 \
    --zero_stage 2 --gpu_memory_utilization 0.7 "$@"
