#!/usr/bin/env bash
# This script trains on GSM8K with the settings of a published verl run (github.com/chrisjmccormick/stacks,
# stacks/qwen-gsm8k): one H100, Qwen2.5-0.5B-Instruct, verl's prompt in Qwen's chat form, GRPO, and one pass of 467 steps with
# 16 problems and 16 samples of each problem.
# In the verl run the test accuracy (mean of 8 samples) rose from 30.2 % to 54.8 %. The best of 8 samples rose from 60.4 % to
# 75.2 %. The verl run took 77 minutes, 6.39 s for each step.
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen2.5-0.5B-Instruct --data "openai/gsm8k:main?split=train" \
    --eval_data "openai/gsm8k:main?split=test" --eval_n 8 --eval_interval 0 --run_dir out/gsm8k_0p5b --answer_form hashes \
    --template $'<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n{question} Let\'s think step by step and output the final answer after "####".<|im_end|>\n<|im_start|>assistant\n' \
    --stop "" --estimator grpo --skip_flat true --num_episodes 1 --max_steps 467 --rollout_batch_size 16 --n_samples_per_prompt 16 \
    --generate_max_len 512 --prompt_max_len 512 --max_len 1024 --warmup_updates 1 --zero_stage 2 --kv_cache_gb 4 \
    "$@"
