#!/usr/bin/env bash
# This script trains Qwen2.5-1.5B on one GPU of 80 GB, with Python as a tool (docs/data.md). The machine needs
# bubblewrap.
# This script was not run. We know of no published run of these sizes.
exec "$(dirname "$0")/launch.sh" 1 1 --task python_tool --max_turns 4 \
    --model Qwen/Qwen2.5-1.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json --eval_n 4 --run_dir out/tool_1p5b_1gpu --estimator grpo --skip_flat true \
    --zero_stage 2 --rollout_batch_size 64 --n_samples_per_prompt 16 --prompt_max_len 1024 --generate_max_len 3072 \
    --max_len 4096 --gpu_memory_utilization 0.5 "$@"
