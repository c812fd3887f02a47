#!/usr/bin/env bash
# This script trains Qwen2.5-1.5B on one GPU of 80 GB. ORZ's 7B is the teacher, and scores each token (docs/change.md).
# This script was not run. If the tokenizers differ, the run ends at its start.
exec "$(dirname "$0")/launch.sh" 1 1 --variant distill --teacher Open-Reasoner-Zero/Open-Reasoner-Zero-7B \
    --model Qwen/Qwen2.5-1.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json --eval_n 4 --run_dir out/distill_1p5b_1gpu \
    --estimator reinforce --zero_stage 2 --rollout_batch_size 128 --n_samples_per_prompt 4 --prompt_max_len 1024 --generate_max_len 3072 \
    --max_len 4096 --gpu_memory_utilization 0.4 "$@"
