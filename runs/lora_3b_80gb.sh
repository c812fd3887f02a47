#!/usr/bin/env bash
# This script trains a 3B model by GRPO on one card of 80 GB. The variant lora trains adapters of rank 32 and no other weights
# of the policy. The variant needs `pip install --no-deps -r requirements-extras.txt`.
# Its sizes are planned and were not run.
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-3B --data data/orz_math_57k_collected.json --variant lora \
    --eval_data data/math500.json --run_dir out/lora_3b_80gb --estimator grpo --skip_flat true --zero_stage 2 --actor_learning_rate 1e-5 \
    --rollout_batch_size 32 --n_samples_per_prompt 16 --generate_max_len 3072 --max_len 4096 --prompt_max_len 1024 "$@"
