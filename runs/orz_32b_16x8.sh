#!/usr/bin/env bash
# This recipe trains ORZ 32B on 16 machines with 8 GPUs of 80 GB each. One sampler runs on 4 GPUs.
# ORZ's report shows that the length goes up and down while the reward rises. ORZ then trained this policy for 100 steps on
# the 13k hardest problems, with a learning rate that falls to 3e-7. The flags are --model out/orz_32b_16x8/policy,
# --data data/orz_math_13k_collection_hard.json, --max_steps 100, --warmup_updates 1, --variant lr_end, --lr_end 3e-7 and
# another --run_dir. After these steps ORZ reports 48.1 % on AIME 2024, 92.2 % on MATH500 and 55.5 % on GPQA-Diamond.
exec "$(dirname "$0")/launch.sh" 16 8 --model Qwen/Qwen2.5-32B --data data/orz_math_57k_collected.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_32b_16x8 \
    --tensor_parallel 4 --gpu_memory_utilization 0.7 "$@"
