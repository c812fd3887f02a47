#!/usr/bin/env bash
# smollm2_cpu.sh FOLDER trains a real model by GRPO on word problems of one line, on 2 CPU cores. The prompt shows two solved
# problems. FOLDER has a causal LM of about 135 M parameters. docs/run.md makes the model from SmolLM2 and has
# the measured results.
[ $# -ge 1 ] || { echo "usage: runs/smollm2_cpu.sh FOLDER [FLAGS]" >&2; exit 2; }
model=$(realpath -e -- "$1" 2>/dev/null) || {
    echo "error: no folder $1; docs/run.md says how to make the model" >&2; exit 2; }
cd "$(dirname "$0")/.." && PATH="$PWD/.venv/bin:$PATH" python tools/base_model.py words out/words || exit
exec runs/launch.sh 1 1 --model "$model" --run_dir out/smollm2 --estimator grpo --skip_flat true \
    --template $'Q: Tom has 8 pens and buys 5 more. How many pens are there now?\nA: 8+5=13\nQ: Ana has 3 boxes of '\
$'4 eggs and loses 2. How many eggs are there now?\nA: 3*4=12 12-2=10\nQ: {question}\nA:' --answer_form last_number \
    --data out/words/train.jsonl --eval_data out/words/eval.jsonl --eval_interval 10 --max_steps 50 --stop $'\n' \
    --rollout_batch_size 16 --n_samples_per_prompt 8 --generate_max_len 24 --prompt_max_len 128 --max_len 160 \
    --packing_max_len 160 --micro_train_batch_size 16 --gradient_checkpointing false --zero_stage 2 \
    --actor_learning_rate 2e-5 --warmup_updates 3 --kv_cache_gb 0.5 "${@:2}"
