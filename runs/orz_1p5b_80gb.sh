#!/usr/bin/env bash
# This recipe trains all weights of ORZ 1.5B on one card of 80 GB, by PPO with a critic of the same size.
# Memory (planned, never run): rollout 65, critic 55, policy 55, sync 65 of 79 GiB.
# Time (planned, never run): 128.9 s a step, 3.6 h for 100 steps on 1 x H100.
# This recipe only tests that the run works at these sizes. A step of ORZ's own 1.5B run had 128 x 64 samples.
export CARD=H100
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-1.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json --run_dir out/orz_1p5b_80gb --zero_stage 2 \
    --rollout_batch_size 32 --n_samples_per_prompt 16 --critic_updates 4 --generate_max_len 3072 --max_len 4096 \
    --prompt_max_len 1024 --gpu_memory_utilization 0.3 "$@"
