#!/usr/bin/env bash
# ORZ 7B, the recipe's main run, on 4 machines of 8 GPUs of 80 GB; --run_dir must be a folder that all mount.
# ZeRO 3, packed rows of 16,384 tokens, 12 critic steps and 1 policy step for every 128 x 64 samples: the defaults.
# Memory (planned, never run): rollout 65, critic 25, policy 25, sync 65 of 79 GiB.
# Time (planned, never run): 704.6 s a step, 19.6 h for 100 steps on 32 x H100.
# Expect (ORZ's report): reward and response length that rise steadily.
exec "$(dirname "$0")/launch.sh" 4 8 --model Qwen/Qwen2.5-7B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_7b_4x8 \
    --gpu_memory_utilization 0.7 "$@"
