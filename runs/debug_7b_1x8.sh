#!/usr/bin/env bash
# This script tests that a 7B run fits and works on one machine of 8 GPUs. It has ORZ's debug sizes: 16 problems, 2 samples
# of each problem, 1 update of the critic.
# The run should make three steps and a checkpoint after each step, and end with exit code 0. Its rewards are near 0.
exec "$(dirname "$0")/launch.sh" 1 8 --model Qwen/Qwen2.5-7B --data data/orz_math_57k_collected.json \
    --run_dir out/debug_7b_1x8 --rollout_batch_size 16 --n_samples_per_prompt 2 --critic_updates 1 \
    --max_steps 3 --save_interval 1 --gpu_memory_utilization 0.35 "$@"
