#!/usr/bin/env bash
# This script trains ORZ 7B, the main run, on 4 machines with 8 GPUs of 80 GB each. All machines must share --run_dir.
# The flags keep the defaults: ZeRO 3, packed rows of 16,384 tokens, and 12 updates of the critic and 1 update of the policy
# for every 128 x 64 samples.
# ORZ's report shows that reward and response length rise steadily. This script was not run.
# For ORZ 32B copy it with 16 machines, --model Qwen/Qwen2.5-32B and --tensor_parallel 4.
exec "$(dirname "$0")/launch.sh" 4 8 --model Qwen/Qwen2.5-7B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_7b_4x8 \
    --gpu_memory_utilization 0.7 "$@"
