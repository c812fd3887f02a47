#!/usr/bin/env bash
# This recipe trains ORZ 0.5B on one GPU of 80 GB. With one GPU ZeRO shards nothing. A step has ORZ's 128 x 64 samples, so a
# step takes long.
# ORZ's report shows that reward and response length rise steadily.
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json --eval_n 4 --run_dir out/orz_0p5b_1gpu \
    --zero_stage 2 --gpu_memory_utilization 0.4 "$@"
