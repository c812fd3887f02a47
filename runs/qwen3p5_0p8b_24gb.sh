#!/usr/bin/env bash
# This script trains the text part of Qwen3.5-0.8B on GSM8K on one card of 24 GB, with GRPO. Three of its four layers are
# recurrent, so each sample has a row of its own (docs/run.md). Install flash-linear-attention and causal-conv1d first:
# without these packages transformers computes the recurrent layers with slow code.
# Its sizes are planned and were not run. We know of no published run of these sizes.
export CARD_GB="${CARD_GB:-24}"
exec "$(dirname "$0")/launch.sh" 1 1 --model Qwen/Qwen3.5-0.8B --data "openai/gsm8k:main?split=train" \
    --eval_data "openai/gsm8k:main?split=test" --run_dir out/qwen3p5_0p8b_24gb --answer_form boxed_anywhere \
    --template chat --chat_template_kwargs '{"enable_thinking": false}' --system "Put the final answer into \\boxed{}." \
    --stop "" --estimator grpo --skip_flat true \
    --zero_stage 2 --rollout_batch_size 16 --n_samples_per_prompt 16 --max_steps 100 --prompt_max_len 512 \
    --generate_max_len 1024 --max_len 1536 --packing_max_len 8192 --micro_rollout_batch_size 128 --warmup_updates 1 \
    --gpu_memory_utilization 0.4 "$@"
