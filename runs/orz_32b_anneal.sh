#!/usr/bin/env bash
# ORZ 32B's annealing: the 13k hardest problems, learning rate falling linearly to 3e-7 over 100 steps, from the policy
# that orz_32b_16x8.sh exported. The critic starts anew from the policy's body.
# Memory: as orz_32b_16x8.sh; the plan needs the exported policy, or --model Qwen/Qwen2.5-32B beside --dry_run.
# Time (planned, never run): 801.7 s a step, 22.3 h for 100 steps on 128 x H100.
# Expect (ORZ's README): AIME 2024 from about 41 to about 48 %.
exec "$(dirname "$0")/launch.sh" 16 8 --model out/orz_32b_16x8/policy --data data/orz_math_13k_collection_hard.json \
    --eval_data data/math500.json data/aime2024.json data/gpqa_diamond.json --eval_n 16 --run_dir out/orz_32b_anneal \
    --tensor_parallel 4 --gpu_memory_utilization 0.7 --max_steps 100 --warmup_updates 1 --variant lr_end --lr_end 3e-7 "$@"
