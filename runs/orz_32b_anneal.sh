#!/usr/bin/env bash
# This recipe anneals ORZ 32B: it trains the policy that orz_32b_16x8.sh exported on the 13k hardest problems. The learning
# rate falls linearly to 3e-7 over 100 steps. A new critic starts from the policy's body.
# The memory is as in orz_32b_16x8.sh. A dry run needs the exported policy, or the flag --model Qwen/Qwen2.5-32B.
# Time (planned, never run): 801.7 s a step, 22.3 h for 100 steps on 128 x H100.
# According to ORZ's README, AIME 2024 rises from about 41 % to about 48 %.
exec "$(dirname "$0")/launch.sh" 16 8 --model out/orz_32b_16x8/policy --data data/orz_math_13k_collection_hard.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_32b_anneal \
    --tensor_parallel 4 --gpu_memory_utilization 0.7 --max_steps 100 --warmup_updates 1 --variant lr_end --lr_end 3e-7 "$@"
