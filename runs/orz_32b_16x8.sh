#!/usr/bin/env bash
# ORZ 32B on 16 machines of 8 GPUs of 80 GB; a sampler is shared by 4 GPUs.
# Memory (planned, never run): rollout 66, critic 36, policy 36, sync 66 of 79 GiB.
# Time (planned, never run): 801.7 s a step, 22.3 h for 100 steps on 128 x H100.
# Expect (ORZ's report): length that goes up and down while reward rises; in the end, annealed, AIME 2024 48.1,
# MATH500 92.2, GPQA-Diamond 55.5 %.
exec "$(dirname "$0")/launch.sh" 16 8 --model Qwen/Qwen2.5-32B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_32b_16x8 \
    --tensor_parallel 4 --gpu_memory_utilization 0.7 "$@"
