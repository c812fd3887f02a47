"""Small faults of the code, and the tests that must notice each: the table of tests/mutants.py.

A mutant replaces the text `old`, which occurs exactly once in `file`, by `new`. At least one of its
`tests` must fail then.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def of(file, *names):
    return [f"tests/test_{file}.py::{name}" for name in names]


def rule(name):
    return [f"tests/test_equal.py::test_each_rule_has_its_cases[{name}]"]


DISK = of("ckpt", "test_all_is_on_disk_before_the_name_is")
ORDER = of("train", "test_the_order_of_the_loop")
TWICE = of("train", "test_no_randomness_is_used_twice")
EVALUATION = of("train", "test_evaluation_has_its_own_distribution_and_its_own_randomness")
STEPS = of("rollout", "test_steps_share_neither_a_problem_nor_a_seed_until_the_pass_ends")
PASSES = of("rollout", "test_every_pass_has_each_problem_once_in_another_order")
ROOM = of("rollout", "test_prompt_and_response_fill_max_len_to_the_last_token")
STOP = of("rollout", "test_a_stop_string_ends_a_response_and_stays_in_it")
RATES = of("ppo", "test_engines_get_the_rates_of_the_closed_form")
GAE = of("ppo", "test_the_reward_of_a_one_token_response_is_on_that_token")
ADVANTAGES = of("ppo", "test_compute_advantages")
PACKED = of("ppo", "test_every_response_token_is_predicted_exactly_once")
TIS = of("ppo", "test_tis_cap_weighs_a_token_by_its_ratio_and_at_most_by_the_cap")
HEAD = of("models", "test_chunked_logprobs_equal_full_ones")
CAPS = of("levers", "test_length_budget_follows_what_responses_needed")
STAGES = of("levers", "test_two_stages_expand_where_something_can_be_learnt")
REFUSED = of("check", "test_flags_that_cannot_work_are_refused_in_one_line")
ACCEPTED = of("check", "test_a_good_config_is_accepted")
DROP = of("ablations", "test_a_patch_does_what_it_says[overlong_drop]")
FUSE = of("ablations", "test_a_patch_does_what_it_says[fuse_values]")
FUSE_TWO = of("ablations", "test_fused_values_reach_both_of_two_ranks")

VALUES_THEN_ADVANTAGES = """            with clock("values"):
                if critic:
                    batch.tokens["values"] = ppo.values(critic, batch, cfg)
                if reference:  # it is only logged
                    batch.tokens["ref_logprobs"] = ppo.logprobs(reference, batch, cfg)

            # 6. Advantages, by one of ppo.ESTIMATORS. HACK HERE.
            with clock("advantage"):
                stats = ppo.compute_advantages(batch, cfg)
"""
ADVANTAGES_THEN_VALUES = """            with clock("advantage"):
                stats = ppo.compute_advantages(batch, cfg)
            with clock("values"):
                if critic:
                    batch.tokens["values"] = ppo.values(critic, batch, cfg)
                if reference:  # it is only logged
                    batch.tokens["ref_logprobs"] = ppo.logprobs(reference, batch, cfg)
"""
FINISH_THEN_SAVE = """            state.finish_step(run_dir)
            if save_error or state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
"""
SAVE_THEN_FINISH = """            is_last = step + 1 == total_steps
            if save_error or is_last or is_due(state.step + 1, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
            state.finish_step(run_dir)
"""
LOG_THEN_FINISH = """            log.step(step + 1, samples, batch, stats, clock)
            state.finish_step(run_dir)
"""
FINISH_THEN_LOG = """            state.finish_step(run_dir)
            log.step(step + 1, samples, batch, stats, clock)
"""
POLICY_THEN_SYNC = """\
                stats |= ppo.train_policy(policy, batch, cfg, step, total_steps)

            # 8. Sync: the sampler wakes up with the weights that were just learnt.
            with clock("sync"):
                rollout.sampler.sync(models.named_weights(policy))
"""
SYNC_THEN_POLICY = """                rollout.sampler.sync(models.named_weights(policy))
            with clock("sync"):
                stats |= ppo.train_policy(policy, batch, cfg, step, total_steps)
"""

MUTANTS = [
    # ---- train.py: randomness and what is asked for
    Mutant(
        "every evaluation draws with the seeds of step 0",
        "train.py",
        '(cfg.seed, step, f"eval {name}")',
        '(cfg.seed, 0, f"eval {name}")',
        TWICE,
    ),
    Mutant(
        "an evaluation draws with training's seeds",
        "train.py",
        '(cfg.seed, step, f"eval {name}")',
        '(cfg.seed, step, "train")',
        TWICE,
    ),
    Mutant(
        "all evaluated sets have the same seeds",
        "train.py",
        '(cfg.seed, step, f"eval {name}")',
        '(cfg.seed, step, "eval")',
        EVALUATION,
    ),
    Mutant(
        "the check at the start draws with training's seeds",
        "train.py",
        '(cfg.seed, 0, "check")',
        '(cfg.seed, 0, "train")',
        TWICE,
    ),
    Mutant(
        "an evaluation samples at the training's temperature",
        "train.py",
        "cfg.eval_temperature, cfg.eval_top_p)",
        "cfg.temperature, cfg.eval_top_p)",
        EVALUATION,
    ),
    Mutant(
        "an evaluation cuts the distribution where training does",
        "train.py",
        "cfg.eval_temperature, cfg.eval_top_p)",
        "cfg.eval_temperature, cfg.top_p)",
        EVALUATION,
    ),
    Mutant(
        "an evaluation draws as many samples as training",
        "train.py",
        "problems, cfg.eval_n, (cfg.seed",
        "problems, cfg.n_samples_per_prompt, (cfg.seed",
        EVALUATION,
    ),
    Mutant(
        "every step asks for the first prompts",
        "train.py",
        "requests_of_step(problems, cfg, step)",
        "requests_of_step(problems, cfg, 0)",
        of("train", "test_steps_go_through_the_problems_without_overlap"),
    ),
    Mutant(
        "--adaptive_len alone is not heard",
        "train.py",
        "if not (cfg.first_stage or cfg.adaptive_len):",
        "if not cfg.first_stage:",
        of("train", "test_levers_are_loaded_only_when_they_are_pulled"),
    ),
    Mutant(
        "the loop goes past the levers",
        "train.py",
        "samples = sample(requests, clock)",
        "samples = rollout.sample(requests, clock)",
        of("levers", "test_a_step_asks_for_no_more_than_the_caps_of_the_step_before"),
    ),
    Mutant(
        "the levers' memory is not the run's",
        "train.py",
        "Levers(rollout, cfg, state.levers).sample",
        "Levers(rollout, cfg, {}).sample",
        of("train", "test_levers_are_loaded_only_when_they_are_pulled"),
    ),
    # ---- train.py: the order of the loop
    Mutant(
        "advantages are computed before there are values",
        "train.py",
        VALUES_THEN_ADVANTAGES,
        ADVANTAGES_THEN_VALUES,
        ORDER,
    ),
    Mutant(
        "values are those of the critic after its update",
        "train.py",
        "stats |= ppo.train_critic(critic, batch, cfg, step)",
        "stats |= ppo.train_critic(critic, batch, cfg, step)\n"
        '                    batch.tokens["values"] = ppo.values(critic, batch, cfg)',
        ORDER,
    ),
    Mutant(
        "the reference is the policy itself",
        "train.py",
        "ppo.logprobs(reference, batch, cfg)",
        "ppo.logprobs(policy, batch, cfg)",
        ORDER,
    ),
    Mutant(
        "the sampler never gets new weights",
        "train.py",
        "                rollout.sampler.sync(models.named_weights(policy))\n",
        "                pass\n",
        of("train", "test_a_sync_brings_the_new_weights"),
    ),
    Mutant(
        "the sampler gets the weights from before the update",
        "train.py",
        POLICY_THEN_SYNC,
        SYNC_THEN_POLICY,
        of("train", "test_a_sync_brings_the_new_weights"),
    ),
    Mutant(
        "a resumed run samples from the base model first",
        "train.py",
        "    rollout.sampler.sync(models.named_weights(policy))\n    sample =",
        "    sample =",
        ORDER,
    ),
    Mutant(
        "weights are restored after the sampler has got them",
        "train.py",
        "    ckpt.restore(run_dir, source, engines, state)\n"
        "    rollout.sampler.sync(models.named_weights(policy))\n",
        "    rollout.sampler.sync(models.named_weights(policy))\n"
        "    ckpt.restore(run_dir, source, engines, state)\n",
        ORDER,
    ),
    Mutant(
        "the sampler stays awake beside the trainer",
        "train.py",
        "            rollout.sampler.sleep()\n",
        "",
        ORDER,
    ),
    Mutant(
        "the critic's step is counted from 1",
        "train.py",
        "ppo.train_critic(critic, batch, cfg, step)",
        "ppo.train_critic(critic, batch, cfg, step + 1)",
        of("train", "test_rates_rise_from_the_first_step_on"),
    ),
    Mutant(
        "the policy's step is counted from 1",
        "train.py",
        "ppo.train_policy(policy, batch, cfg, step, total_steps)",
        "ppo.train_policy(policy, batch, cfg, step + 1, total_steps)",
        of("train", "test_rates_rise_from_the_first_step_on"),
    ),
    Mutant(
        "the policy's rate falls over the steps that are left",
        "train.py",
        "ppo.train_policy(policy, batch, cfg, step, total_steps)",
        "ppo.train_policy(policy, batch, cfg, step, total_steps - step)",
        ORDER,
    ),
    Mutant(
        "there is no first evaluation",
        "train.py",
        "if step == 0 or is_due(step, cfg.eval_interval):",
        "if step > 0 and is_due(step, cfg.eval_interval):",
        ORDER,
    ),
    Mutant(
        "there is no first evaluation without an interval",
        "train.py",
        "if step == 0 or is_due(step, cfg.eval_interval):",
        "if is_due(step, cfg.eval_interval):",
        of("levers", "test_a_step_asks_for_no_more_than_the_caps_of_the_step_before"),
    ),
    Mutant(
        "every step begins with an evaluation",
        "train.py",
        "if step == 0 or is_due(step, cfg.eval_interval):",
        "if step == state.step or is_due(step, cfg.eval_interval):",
        ORDER,
    ),
    Mutant(
        "an evaluation is booked at the step after",
        "train.py",
        "                evaluate(rollout, eval_sets, step, log)\n",
        "                evaluate(rollout, eval_sets, step + 1, log)\n",
        ORDER,
    ),
    Mutant(
        "there is no last evaluation",
        "train.py",
        "        evaluate(rollout, eval_sets, total_steps, log)\n",
        "",
        ORDER,
    ),
    Mutant(
        "a checkpoint knows the step before",
        "train.py",
        FINISH_THEN_SAVE,
        SAVE_THEN_FINISH,
        ORDER,
    ),
    Mutant(
        "a checkpoint cuts off the last line of the logs",
        "train.py",
        LOG_THEN_FINISH,
        FINISH_THEN_LOG,
        ORDER,
    ),
    Mutant(
        "the last step is not saved",
        "train.py",
        "state.step == total_steps or is_due(state.step",
        "is_due(state.step",
        ORDER,
    ),
    Mutant(
        "an interval of 0 is always",
        "train.py",
        "return interval > 0 and step % interval == 0",
        "return interval == 0 or step % interval == 0",
        of("train", "test_an_interval_of_0_is_never"),
    ),
    Mutant(
        "the critic is not exported",
        "train.py",
        "    for engine in trained:\n",
        "    for engine in trained[:1]:\n",
        ORDER,
    ),
    # ---- train.py: set-up
    Mutant(
        "a prompt of exactly --prompt_max_len is left out",
        "train.py",
        "if 0 < len(ids) <= cfg.prompt_max_len:",
        "if 0 < len(ids) < cfg.prompt_max_len:",
        of("train", "test_too_long_prompts_are_left_out_aloud"),
    ),
    Mutant(
        "a problem's index counts the kept ones",
        "train.py",
        "dataclasses.replace(problem, index=index, prompt_ids=ids)",
        "dataclasses.replace(problem, index=len(kept), prompt_ids=ids)",
        of("train", "test_too_long_prompts_are_left_out_aloud"),
    ),
    Mutant(
        "steps are counted for one pass",
        "train.py",
        "cfg.num_episodes * problems // cfg.rollout_batch_size",
        "problems // cfg.rollout_batch_size",
        of("train", "test_steps_are_counted_from_the_passes"),
    ),
    Mutant(
        "one of the two gaps may be too large",
        "train.py",
        "if not (mean < mean_limit and worst < worst_limit):",
        "if not (mean < mean_limit or worst < worst_limit):",
        of("train", "test_the_mean_and_the_worst_response_are_judged_apart"),
    ),
    # ---- rollout.py
    Mutant(
        "vLLM's one thread stays",
        "rollout.py",
        "        torch.set_num_threads(threads)\n",
        "",
        of("rollout", "test_the_trainer_keeps_its_threads_beside_vllm"),
    ),
    Mutant(
        "a step's samples have the seeds of step 0",
        "rollout.py",
        '(cfg.seed, step, "train")',
        '(cfg.seed, 0, "train")',
        STEPS,
    ),
    Mutant(
        "a problem's samples have one seed",
        "rollout.py",
        "hash64(seed, index), *distribution",
        "seed, *distribution",
        of("rollout", "test_samples_of_a_problem_have_seeds_of_their_own"),
    ),
    Mutant(
        "the problems of a step have the same seeds",
        "rollout.py",
        "seed = hash64(*purpose, group)",
        "seed = hash64(*purpose)",
        STEPS,
    ),
    Mutant(
        "a step begins with the last prompt of the one before",
        "rollout.py",
        "start = step * cfg.rollout_batch_size\n",
        "start = max(0, step * cfg.rollout_batch_size - 1)\n",
        STEPS,
    ),
    Mutant(
        "each step overlaps the one before by a prompt more",
        "rollout.py",
        "start = step * cfg.rollout_batch_size\n",
        "start = step * (cfg.rollout_batch_size - 1)\n",
        STEPS,
    ),
    Mutant(
        "every pass has the same order",
        "rollout.py",
        'hash64(seed, "order", number)',
        'hash64(seed, "order")',
        PASSES,
    ),
    Mutant(
        "the order is drawn with replacement",
        "rollout.py",
        "rng.permutation(count)",
        "rng.integers(count, size=count)",
        PASSES,
    ),
    Mutant(
        "the order is the same for every seed",
        "rollout.py",
        'hash64(seed, "order", number)',
        'hash64("order", number)',
        PASSES,
    ),
    Mutant(
        "a response may be one token too long for max_len",
        "rollout.py",
        "room = self.cfg.max_len - len(request.problem.prompt_ids)",
        "room = self.cfg.max_len - len(request.problem.prompt_ids) + 1",
        ROOM,
    ),
    Mutant(
        "the last token of max_len stays empty",
        "rollout.py",
        "room = self.cfg.max_len - len(request.problem.prompt_ids)",
        "room = self.cfg.max_len - len(request.problem.prompt_ids) - 1",
        ROOM,
    ),
    Mutant(
        "a request's own limit is not heard",
        "rollout.py",
        "most = min(request.max_tokens, room)",
        "most = room",
        of("rollout", "test_a_response_ends_at_its_own_limit_and_at_max_len"),
    ),
    Mutant(
        "a special token is no stop",
        "rollout.py",
        "            stop_token_ids=self.stop_ids,\n",
        "",
        of("rollout", "test_a_special_token_ends_a_response_and_stays_in_it"),
    ),
    Mutant(
        "a word that is no special token is given by its id",
        "rollout.py",
        "if token.special and token.content in texts:",
        "if token.content in texts:",
        of("rollout", "test_stops_that_are_special_tokens_are_known"),
    ),
    Mutant(
        "weights that a folder lacks are drawn",
        "lib/models.py",
        "    if missing:\n",
        "    if False:\n",
        of("models", "test_a_folder_whose_weights_have_other_names_is_refused"),
    ),
    Mutant(
        "a checkpoint from before a flag is another run's",
        "ckpt.py",
        "saved.config.get(name, fixed.get(name, value))",
        "saved.config.get(name)",
        of("ckpt", "test_a_checkpoint_from_before_a_flag_has_its_default"),
    ),
    Mutant(
        "the stop string is left out of the text",
        "rollout.py",
        "include_stop_str_in_output=True",
        "include_stop_str_in_output=False",
        STOP,
    ),
    Mutant(
        "samples are not seeded",
        "rollout.py",
        "seed=request.seed,",
        "seed=None,",
        of("rollout", "test_a_sample_does_not_depend_on_what_else_is_sampled"),
    ),
    Mutant(
        "a call reuses the blocks of the one before",
        "rollout.py",
        "is_cold = self.llm.reset_prefix_cache()",
        "is_cold = True",
        of("rollout", "test_every_call_of_the_sampler_starts_cold"),
    ),
    Mutant(
        "log-probs are taken without the temperature",
        "rollout.py",
        '"logprobs_mode": "processed_logprobs"',
        '"logprobs_mode": "raw_logprobs"',
        of("rollout", "test_the_right_weights_are_accepted_with_both_numbers"),
    ),
    Mutant(
        "a sample is graded by another's label",
        "rollout.py",
        "label = share[k].problem.label",
        "label = requests[k].problem.label",
        of("rollout", "test_samples_are_dealt_singly"),
    ),
    Mutant(
        "whole groups go to one engine",
        "rollout.py",
        "positions = range(engine, len(requests), engines)",
        "size = len(requests) // engines\n"
        "        positions = range(engine * size, engine * size + size)",
        of("rollout", "test_samples_are_dealt_singly"),
    ),
    Mutant(
        "every rank of a shared engine hands its samples on",
        "rollout.py",
        "if rank_in_engine == 0:",
        "if rank_in_engine >= 0:",
        of("rollout", "test_ranks_that_share_an_engine_ask_alike_and_one_of_them_hands_on"),
    ),
    # ---- ppo.py
    Mutant(
        "the critic's rate is one optimizer step late",
        "ppo.py",
        "optimizer_step = step * cfg.critic_update_steps + k",
        "optimizer_step = step * cfg.critic_update_steps + k - 1",
        RATES,
    ),
    Mutant(
        "all parts of a step have the critic's first rate",
        "ppo.py",
        "optimizer_step = step * cfg.critic_update_steps + k",
        "optimizer_step = step * cfg.critic_update_steps",
        RATES,
    ),
    Mutant(
        "few samples slow the critic's warm-up down",
        "ppo.py",
        "optimizer_step = step * cfg.critic_update_steps + k",
        "optimizer_step = step * count + k",
        RATES,
    ),
    Mutant(
        "the policy's rate is one step late",
        "ppo.py",
        "cfg.num_warmup_steps, step, cfg.lr_end, total_steps)",
        "cfg.num_warmup_steps, max(0, step - 1), cfg.lr_end, total_steps)",
        RATES,
    ),
    Mutant(
        "the policy's rate does not fall",
        "ppo.py",
        "cfg.num_warmup_steps, step, cfg.lr_end, total_steps)",
        "cfg.num_warmup_steps, step)",
        RATES,
    ),
    Mutant(
        "the critic's parts are the same in every step",
        "ppo.py",
        'hash64(cfg.seed, step, "critic")',
        'hash64(cfg.seed, "critic")',
        of("ppo", "test_the_critic_s_parts_are_others_in_every_step"),
    ),
    Mutant(
        "the critic sees the samples in their order",
        "ppo.py",
        "np.array_split(rng.permutation(len(batch.size)), count)",
        "np.array_split(np.arange(len(batch.size)), count)",
        of("ppo", "test_the_critic_s_parts_are_others_in_every_step"),
    ),
    Mutant(
        "the reward of a one-token response is behind it",
        "ppo.py",
        "last = mask.sum(1, keepdim=True) - 1  # (N, 1)",
        "last = (mask.sum(1, keepdim=True) - 1).clamp(1, mask.shape[1] - 1)",
        GAE,
    ),
    Mutant(
        "gae discounts its sum by gamma alone",
        "ppo.py",
        "sums[:, t] += cfg.gamma * lambd * sums",
        "sums[:, t] += cfg.gamma * sums",
        of("ppo", "test_gae_is_the_double_sum"),
    ),
    Mutant(
        "the critic's target is whitened",
        "ppo.py",
        'batch.tokens["returns"] = returns.float()',
        'batch.tokens["returns"] = (advantages + values).float()',
        ADVANTAGES,
    ),
    Mutant(
        "whitening takes the spread of a draw",
        "ppo.py",
        "spread = advantages.var(correction=0)",
        "spread = advantages.var(correction=1)",
        ADVANTAGES,
    ),
    Mutant(
        "group scores are whitened as well",
        "ppo.py",
        "if cfg.advantage_normalization and cfg.estimator in WHITENED:",
        "if cfg.advantage_normalization:",
        ADVANTAGES,
    ),
    Mutant(
        "rloo keeps the sample in its own baseline",
        "ppo.py",
        "(rewards - mean) * count / (count - 1), 0.0)",
        "(rewards - mean), 0.0)",
        of("ppo", "test_group_estimators_against_loops"),
    ),
    Mutant(
        "the stop token is not trained",
        "ppo.py",
        "predict += [False] * (len(prompt) - 1) + [True] * len(response) + [False]",
        "predict += [False] * (len(prompt) - 1) + [True] * (len(response) - 1) + [False] * 2",
        PACKED,
    ),
    Mutant(
        "positions run on through a row",
        "ppo.py",
        "positions += range(batch.size[i])",
        "positions += range(len(positions), len(positions) + batch.size[i])",
        PACKED,
    ),
    Mutant(
        "a sample needs an advantage on every token",
        "ppo.py",
        "if part.any()]",
        "if part.all()]",
        of("ppo", "test_samples_with_signal"),
    ),
    Mutant(
        "log-probs are computed at temperature 1",
        "ppo.py",
        "return policy(micro, cfg.temperature)[0]",
        "return policy(micro, 1.0)[0]",
        of("models", "test_packed_equals_unpacked"),
    ),
    Mutant(
        "the truncated ratio is a floor",
        "ppo.py",
        "log_ratio.exp().clamp(max=cfg.tis_cap)",
        "log_ratio.exp().clamp(min=cfg.tis_cap)",
        TIS,
    ),
    Mutant(
        "the ratio is the sampler's to the trainer's",
        "ppo.py",
        "(logprobs.detach() - sampled)",
        "(sampled - logprobs.detach())",
        TIS,
    ),
    Mutant(
        "the ratio has a gradient of its own",
        "ppo.py",
        "(logprobs.detach() - sampled)",
        "(logprobs - sampled)",
        TIS,
    ),
    Mutant(
        "the short cut is taken for every lambda",
        "ppo.py",
        "if cfg.gamma == 1 and lambd == 1:",
        "if cfg.gamma == 1:",
        of("ppo", "test_gae_is_the_double_sum"),
    ),
    Mutant(
        "means of groups are taken on a GPU",
        "ppo.py",
        "on_cpu = rewards.cpu()",
        "on_cpu = rewards",
        of("ppo", "test_advantages_are_computed_on_the_device"),
    ),
    Mutant(
        "the padding belongs to the row's last sample",
        "ppo.py",
        "            parts.append(padding)\n",
        "            parts[-1] += padding\n",
        PACKED,
    ),
    Mutant(
        "skipped samples leave the denominator",
        "ppo.py",
        "denominator = int(batch.length.sum())",
        "denominator = int(batch.length[batch.with_signal()].sum())",
        of("ppo", "test_step_on_one_rank[grpo]"),
    ),
    Mutant(
        "the value clip takes the better loss",
        "ppo.py",
        "worse = torch.maximum(",
        "worse = torch.minimum(",
        of("ppo", "test_step_on_one_rank[zero0]"),
    ),
    Mutant(
        "the policy learns while the critic warms up",
        "ppo.py",
        "    if step < 0:\n        return {}\n",
        "",
        of("ppo", "test_the_critic_warms_up_alone"),
    ),
    Mutant(
        "the policy's rate is counted from the run's first step",
        "ppo.py",
        "num_warmup_steps, step, cfg.lr_end, total_steps)",
        "num_warmup_steps, step + cfg.critic_warmup_steps, cfg.lr_end, total_steps)",
        of("ppo", "test_the_critic_warms_up_alone"),
    ),
    # ---- lib/head.py
    Mutant(
        "backward forgets the temperature",
        "lib/head.py",
        "on_token = grad_logprobs[part, None] / ctx.temperature",
        "on_token = grad_logprobs[part, None]",
        HEAD,
    ),
    Mutant(
        "kept scores are taken from the wrong end",
        "lib/head.py",
        "ctx.kept.pop(0)",
        "ctx.kept.pop()",
        HEAD,
    ),
    Mutant(
        "scores are made again at temperature 1",
        "lib/head.py",
        "chunk_log_softmax(hidden[part], weight, ctx.temperature)",
        "chunk_log_softmax(hidden[part], weight, 1.0)",
        of("models", "test_scores_too_large_to_keep_are_made_again"),
    ),
    Mutant(
        "the head's gradient is summed in bf16",
        "lib/head.py",
        "torch.zeros_like(weight, dtype=torch.float32)",
        "torch.zeros_like(weight)",
        of("models", "test_chunked_head_sums_bf16_gradients_in_fp32"),
    ),
    Mutant(
        "the head does not know the temperature",
        "lib/head.py",
        "if temperature != 1:",
        "if temperature > 1:",
        HEAD,
    ),
    # ---- lib/models.py
    Mutant(
        "the samples of a row see each other",
        "lib/models.py",
        "use_cache=False",
        "use_cache=True",
        of("models", "test_packed_equals_unpacked"),
    ),
    Mutant(
        "PyTorch's attention looks ahead",
        "lib/attention.py",
        '"window_size": (-1, 0)',
        '"window_size": (-1, -1)',
        of("models", "test_packed_equals_unpacked"),
    ),
    Mutant(
        "attention drops units",
        "lib/models.py",
        "module.attention_dropout = 0.0",
        "pass",
        of("models", "test_dropout_is_off"),
    ),
    Mutant(
        "the value head has the paper's variance",
        "lib/models.py",
        "generator=generator) / (hidden_size + 1)",
        "generator=generator) / (hidden_size + 1) ** 0.5",
        of("models", "test_value_head_init"),
    ),
    Mutant(
        "an engine keeps the rate with which it was made",
        "lib/models.py",
        '        self.deepspeed.optimizer.param_groups[0]["lr"] = lr\n',
        "",
        of("models", "test_adam_has_the_recipes_numbers"),
    ),
    Mutant(
        "a tied head is not named to the sampler",
        "lib/models.py",
        "if isinstance(engine.module, Policy) and model.config.tie_word_embeddings:",
        "if False:",
        of("models", "test_named_weights_are_a_hugging_face_state_dict"),
    ),
    Mutant(
        "a given critic keeps the base model's body",
        "lib/models.py",
        "load_body(cfg, AutoModel, cfg.critic)",
        "load_body(cfg, AutoModel)",
        of("models", "test_a_critic_starts_from_a_folder"),
    ),
    Mutant(
        "a given critic has a new head",
        "lib/models.py",
        "            critic.value_head.load_state_dict(head)\n",
        "            pass\n",
        of(
            "models",
            "test_a_critic_starts_from_a_folder",
            "test_a_folder_without_a_head_that_fits_is_one_line",
        ),
    ),
    Mutant(
        "a head's bias is not exported",
        "ckpt.py",
        'if name.startswith("value_head.")}',
        'if name == "value_head.weight"}',
        of("models", "test_a_critic_starts_from_a_folder"),
    ),
    # ---- lib/common.py
    Mutant(
        "a torch for GPUs that finds none runs on the CPU",
        "lib/common.py",
        "    check_stack(torch.version.cuda, has_gpu)\n",
        "",
        of("common", "test_a_torch_for_gpus_that_finds_none_is_refused"),
    ),
    # ---- lib/metrics.py
    Mutant(
        "memory is what is free on the device",
        "lib/metrics.py",
        "return (total - free) / 2**30",
        "return free / 2**30",
        of("report", "test_memory_is_what_is_in_use_on_the_device"),
    ),
    Mutant(
        "pass_at_n counts right samples",
        "lib/metrics.py",
        "len(batch.groups[right].unique())",
        "len(batch.groups[right])",
        of("report", "test_pass_at_n_is_the_share_of_problems_with_a_right_answer"),
    ),
    Mutant(
        "the error of an evaluation is over samples",
        "lib/metrics.py",
        "rewards.mean(1).std().item() / math.sqrt(max(1, len(rewards) - 1))",
        "rewards.std().item() / math.sqrt(max(1, rewards.size - 1))",
        of("report", "test_numbers_of_an_evaluation"),
    ),
    Mutant(
        "a finished response counts as truncated",
        "lib/metrics.py",
        'sample.finish_reason != "stop"',
        'sample.finish_reason == "stop"',
        of("report", "test_numbers_of_samples"),
    ),
    Mutant(
        "pass@k draws with replacement",
        "lib/metrics.py",
        "math.comb(n - int(c), k) / math.comb(n, k)",
        "(1 - int(c) / n) ** k",
        of("report", "test_pass_at_k_is_the_share_of_draws_with_a_right_one"),
    ),
    Mutant(
        "a phase that comes twice counts once",
        "lib/metrics.py",
        "self.seconds.get(phase, 0.0) + time.perf_counter()",
        "time.perf_counter()",
        of("report", "test_a_phase_that_comes_twice_adds_up"),
    ),
    # ---- lib/report.py
    Mutant(
        "histograms end at max_len",
        "lib/report.py",
        "metrics.of_samples(samples, batch, self.cfg.generate_max_len)",
        "metrics.of_samples(samples, batch, self.cfg.max_len)",
        of("report", "test_a_step_is_a_line_with_all_its_numbers"),
    ),
    Mutant(
        "a sample's tokens are those of the first one",
        "lib/report.py",
        "batch.response_ids[k]]",
        "batch.response_ids[0]]",
        of("report", "test_a_sample_is_written_token_by_token"),
    ),
    Mutant(
        "the numbers of the clock are not written",
        "lib/report.py",
        "line |= learned | clock.numbers",
        "line |= learned",
        of("report", "test_a_step_is_a_line_with_all_its_numbers"),
    ),
    Mutant(
        "a resumed run's tracker keeps the step that comes again",
        "lib/report.py",
        "purge_step=step + 1",
        "purge_step=step + 2",
        of("report", "test_a_resumed_run_s_curve_has_each_step_once"),
    ),
    Mutant(
        "waiting lines are written twice",
        "lib/report.py",
        "            waiting.clear()\n",
        "",
        of("report", "test_a_step_is_a_line_with_all_its_numbers"),
    ),
    Mutant(
        "an old result stays while the run goes on",
        "lib/report.py",
        '        (self.run_dir / "result.json").unlink(missing_ok=True)\n',
        "",
        of("report", "test_the_first_lines_of_a_run"),
    ),
    Mutant(
        "nobody says that a form is never met",
        "lib/report.py",
        "if step == 1 and not (",
        "if step == 0 and not (",
        of("report", "test_a_form_that_no_response_meets_is_said_once_with_three_of_them"),
    ),
    # ---- lib/levers.py
    Mutant(
        "a cap counts truncated responses",
        "lib/levers.py",
        'if sample.finish_reason == "stop":\n                finished',
        "if True:\n                finished",
        CAPS,
    ),
    Mutant(
        "a cap follows the longest response, cut or not",
        "lib/levers.py",
        "int(self.MARGIN * max(finished))",
        "int(self.MARGIN * max(len(sample.response_ids) for sample in samples))",
        CAPS,
    ),
    Mutant(
        "caps are learnt and never asked for",
        "lib/levers.py",
        "requests = [self.budget.limit(request) for request in requests]",
        "pass",
        of("levers", "test_adaptive_caps_are_those_of_the_steps_before"),
    ),
    Mutant(
        "caps are never learnt",
        "lib/levers.py",
        "self.budget.update(samples)",
        "pass",
        of("levers", "test_adaptive_caps_are_those_of_the_steps_before"),
    ),
    Mutant(
        "a problem has the batch's cap",
        "lib/levers.py",
        "return self.caps.get(key, self.caps[self.UNSEEN])",
        "return self.caps[self.UNSEEN]",
        CAPS,
    ),
    Mutant(
        "a problem that was never seen is hopeless",
        "lib/levers.py",
        "self.solved.get(problem_key(tried[0]), True)",
        "self.solved.get(problem_key(tried[0]), False)",
        STAGES,
    ),
    Mutant(
        "the second stage draws the last sample of the first again",
        "lib/levers.py",
        "request.index >= self.cfg.first_stage",
        "request.index >= self.cfg.first_stage - 1",
        STAGES,
    ),
    Mutant(
        "what is solved is not remembered",
        "lib/levers.py",
        "        self.remember_solved(samples)\n",
        "",
        STAGES,
    ),
    # ---- lib/check.py
    Mutant(
        "bf16 is let through at stage 1",
        "lib/check.py",
        "not cfg.bf16 or cfg.zero_stage >= 2",
        "not cfg.bf16 or cfg.zero_stage >= 1",
        REFUSED,
    ),
    Mutant(
        "a prompt may fill max_len",
        "lib/check.py",
        "cfg.prompt_max_len < cfg.max_len",
        "cfg.prompt_max_len <= cfg.max_len",
        REFUSED,
    ),
    Mutant(
        "a row that just holds a sample is refused",
        "lib/check.py",
        "cfg.packing_max_len >= cfg.max_len",
        "cfg.packing_max_len > cfg.max_len",
        ACCEPTED,
    ),
    Mutant(
        "ratios are compared under a cut distribution",
        "lib/check.py",
        "cfg.top_p == 1 or not compares",
        "True",
        REFUSED,
    ),
    Mutant(
        "the checkpoint that is written needs no room",
        "lib/check.py",
        "cfg.keep_last + 1 - present",
        "cfg.keep_last - present",
        of("check", "test_room_is_for_all_checkpoints_to_come"),
    ),
    Mutant(
        "ranks that differ are not heard of",
        "lib/check.py",
        "if found[name] != ours:",
        "if False:",
        of("check", "test_all_ranks_hear_of_the_one_that_differs"),
    ),
    # ---- ablations/
    Mutant(
        "overlong_drop: the policy learns from cut responses",
        "ablations/overlong_drop.patch",
        "+        return [i for i in self.kept if parts[i].any()]",
        "+        return [i for i, part in enumerate(parts) if part.any()]",
        DROP,
    ),
    Mutant(
        "overlong_drop: the critic learns from cut responses",
        "ablations/overlong_drop.patch",
        "rng.permutation(batch.kept)",
        "rng.permutation(len(batch.size))",
        DROP,
    ),
    Mutant(
        "overlong_drop: cut responses count in the whitening",
        "ablations/overlong_drop.patch",
        "used = advantages[is_kept.repeat_interleave(batch.length)]",
        "used = advantages",
        DROP,
    ),
    Mutant(
        "overlong_drop: cut responses count in the denominator",
        "ablations/overlong_drop.patch",
        "batch.length[batch.kept].sum()",
        "batch.length.sum()",
        DROP,
    ),
    Mutant(
        "overlong_drop: a step of cut responses alone is NaN",
        "ablations/overlong_drop.patch",
        "if len(used) > 0:",
        "if len(used) >= 0:",
        DROP,
    ),
    Mutant(
        "overlong_drop: an empty part counts in the logged mean",
        "ablations/overlong_drop.patch",
        "[x[key] for x in history if key in x]",
        "[x.get(key, 0.0) for x in history]",
        DROP,
    ),
    Mutant(
        "fuse_values: a filler adds to the first value",
        "ablations/fuse_values.patch",
        "values.detach() * micro.mask)",
        "values.detach())",
        FUSE_TWO,
    ),
    Mutant(
        "fuse_values: a rank has its own values alone",
        "ablations/fuse_values.patch",
        '+    dist.all_reduce(batch.tokens["values"])',
        "+    pass",
        FUSE_TWO,
    ),
    Mutant(
        "fuse_values: a gamma below 1 is let through",
        "ablations/fuse_values.patch",
        "and cfg.gamma == cfg.lambd == 1",
        "and cfg.lambd == 1",
        FUSE,
    ),
    Mutant(
        "fuse_values: a lambda of the critic's own is let through",
        "ablations/fuse_values.patch",
        "assert cfg.critic_lambd is None and ",
        "assert ",
        FUSE,
    ),
    Mutant(
        "kl_penalty: a token is paid for its distance from the base model",
        "ablations/kl_penalty.patch",
        "-cfg.kl_coef * kl",
        "cfg.kl_coef * kl",
        of("ablations", "test_a_patch_does_what_it_says[kl_penalty]"),
    ),
    Mutant(
        "kl_penalty: a score for a sample knows of no penalty",
        "ablations/kl_penalty.patch",
        "rewards = rewards.sum(1)",
        "rewards = batch.rewards",
        of("ablations", "test_a_patch_does_what_it_says[kl_penalty]"),
    ),
    Mutant(
        "entropy_bonus: a sample without an advantage has none",
        "ablations/entropy_bonus.patch",
        "batch.everyone(), lr",
        "batch.with_signal(), lr",
        of("ablations", "test_a_patch_does_what_it_says[entropy_bonus]"),
    ),
    Mutant(
        "entropy_bonus: a filler has one",
        "ablations/entropy_bonus.patch",
        "entropy * micro.mask",
        "entropy",
        of("ablations", "test_a_patch_does_what_it_says[entropy_bonus]"),
    ),
    Mutant(
        "clip_higher: the upper clip is the lower one's",
        "ablations/clip_higher.patch",
        "1 + cfg.policy_clip_high)",
        "1 + cfg.policy_clip)",
        of("ablations", "test_a_patch_does_what_it_says[clip_higher]"),
    ),
    Mutant(
        "cispo: the ratio has a gradient",
        "ablations/cispo.patch",
        "logprobs.detach() - old",
        "logprobs - old",
        of("ablations", "test_a_patch_does_what_it_says[cispo]"),
    ),
    Mutant(
        "gspo: each token has its own ratio",
        "ablations/gspo.patch",
        "(mean + logprobs",
        "(log_ratio + logprobs",
        of("ablations", "test_a_patch_does_what_it_says[gspo]"),
    ),
    Mutant(
        "overlong_penalty: the room behind the prompt is no limit",
        "ablations/overlong_penalty.patch",
        "min(sample.request.max_tokens, room)",
        "sample.request.max_tokens",
        of("ablations", "test_a_patch_does_what_it_says[overlong_penalty]"),
    ),
    Mutant(
        "dynamic_sampling: all rounds of a step draw the same",
        "ablations/dynamic_sampling.patch",
        'hash64(cfg.seed, "round", number)',
        'hash64(cfg.seed, "round")',
        of("ablations", "test_a_patch_does_what_it_says[dynamic_sampling]"),
    ),
    # ---- ckpt.py and tools/convert.py
    Mutant(
        "a file of an engine is not flushed",
        "ckpt.py",
        "        self.flushes.append(self.threads.submit(fsync, path))",
        "        pass",
        DISK,
    ),
    Mutant(
        "the folder of a checkpoint is not flushed",
        "ckpt.py",
        '[temporary, *temporary.rglob("*"), *logs]:',
        '[*temporary.rglob("*"), *logs]:',
        DISK,
    ),
    Mutant(
        "the logs are not flushed",
        "ckpt.py",
        '[temporary, *temporary.rglob("*"), *logs]:',
        '[temporary, *temporary.rglob("*")]:',
        DISK,
    ),
    Mutant(
        "the small files are not flushed",
        "ckpt.py",
        '[temporary, *temporary.rglob("*"), *logs]:',
        "[temporary, *logs]:",
        DISK,
    ),
    Mutant("a checkpoint's name is not flushed", "ckpt.py", "    fsync(run_dir)", "    pass", DISK),
    Mutant(
        "a checkpoint is renamed before it has a manifest",
        "ckpt.py",
        '    (temporary / "manifest.json").write_text(json.dumps(files, indent=1))',
        "    os.rename(temporary, final)\n    temporary = final\n"
        '    (temporary / "manifest.json").write_text(json.dumps(files, indent=1))',
        DISK,
    ),
    Mutant(
        "a flush that failed is not heard",
        "ckpt.py",
        "            self.attempt(flush.result)",
        "            flush.exception()",
        of("ckpt", "test_a_flush_that_fails_is_a_save_that_failed"),
    ),
    Mutant(
        "an error of rank 1's disk is not heard",
        "ckpt.py",
        "in gather((here(), written, writer.error)):",
        "in gather((here(), written, writer.error))[:1]:",
        of("resume", "test_all_ranks_hear_of_one_sick_disk"),
    ),
    Mutant(
        "a manifest of another shape is a traceback",
        "ckpt.py",
        "    with contextlib.suppress(Exception):",
        "    with contextlib.suppress(OSError, ValueError, KeyError):",
        of("ckpt", "test_a_manifest_of_any_shape_is_damage"),
    ),
    Mutant(
        "a full disk is told in torch's words",
        "ckpt.py",
        "        while isinstance(error.__context__, OSError):",
        "        while False:",
        of("ckpt", "test_a_full_disk_is_told_in_the_kernel_s_words"),
    ),
    Mutant(
        "an export names a tied head",
        "ckpt.py",
        "    if model.config.tie_word_embeddings:",
        "    if False:",
        of("ckpt", "test_an_export_names_a_tied_head_once"),
    ),
    Mutant(
        "what reshard writes is not flushed",
        "tools/convert.py",
        "        ckpt.fsync(place)",
        "        pass",
        of("ckpt", "test_what_reshard_writes_is_on_disk_before_its_name_is"),
    ),
    Mutant(
        "reshard loses the moments of ZeRO 3",
        "lib/reshard.py",
        "            safe_set_local_optimizer_state(parameter, piece, kind)",
        "            pass",
        of("resume", "test_reshard_is_exact"),
    ),
    # ---- lib/equal.py
    Mutant(
        "sympy's cache is kept between checks",
        "lib/equal.py",
        "        sympy.core.cache.clear_cache()\n",
        "",
        of("equal", "test_sympy_s_cache_is_emptied_before_every_check"),
    ),
    Mutant(
        "an expression may stand for a number",
        "lib/equal.py",
        "    if not number:\n        return False",
        "    if not number:\n        return None",
        rule("same_number"),
    ),
    Mutant(
        "lists of any lengths are compared",
        "lib/equal.py",
        "if count_members(predicted) != count_members(label):",
        "if False:",
        rule("same_shape"),
    ),
    Mutant(
        "a set may stand for a pair",
        "lib/equal.py",
        're.fullmatch(r"\\(.*,.*\\)", label)',
        're.fullmatch(r"\\(.*;.*\\)", label)',
        rule("same_shape"),
    ),
    Mutant(
        "what differs by little is equal",
        "lib/equal.py",
        "expressions.append(expression.doit())",
        "expressions.append(expression)",
        rule("symbolic_verdict"),
    ),
    Mutant(
        "numbers below 1e-15 are all 0",
        "lib/equal.py",
        "numeric_precision=60",
        "numeric_precision=15",
        rule("symbolic_verdict"),
    ),
    Mutant(
        "names of other equations are dropped",
        "lib/equal.py",
        'if EQUALS.search(" ".join(values)):',
        "if False:",
        rule("drop_name"),
    ),
    Mutant(
        "a sum is a name on the label's side",
        "lib/equal.py",
        ' or "+" in label.rpartition("=")[0]:',
        ":",
        rule("drop_name"),
    ),
    Mutant(
        "an inequality need not be solved",
        "lib/equal.py",
        "if UNSOLVED.match(predicted) and not UNSOLVED.match(label):",
        "if False:",
        rule("UNSOLVED"),
    ),
    Mutant(
        "primes say nothing",
        "lib/equal.py",
        """if predicted.count("'") != label.count("'"):""",
        "if False:",
        rule("not_algebra"),
    ),
    Mutant(
        "ABCD is abcd",
        "lib/equal.py",
        "return not label.isupper() and predicted.casefold()",
        "return predicted.casefold()",
        rule("same_word"),
    ),
    # ---- reward.py: forms of prompts and answers
    Mutant(
        "every form is ORZ's",
        "reward.py",
        "self.find_answer = ANSWERS[answer]",
        "self.find_answer = extract_answer",
        of(
            "reward",
            "test_known_answers_of_gsm8k_in_every_form",
            "test_submit_says_whether_the_response_holds_an_answer",
        ),
    ),
    Mutant(
        "--answer is not told to the grader",
        "rollout.py",
        "// ranks_here), cfg.answer)",
        "// ranks_here))",
        of("rollout", "test_two_ranks_of_a_machine_grade_on_half_of_its_cores_each"),
    ),
    Mutant(
        "an operation is a sign",
        "reward.py",
        r"(?<![\w)\]}])[-−–]",
        "[-−–]",
        of("reward", "test_a_form_finds_the_answer_in_what_such_models_write"),
    ),
    Mutant(
        "the model's turn has not begun",
        "train.py",
        "add_generation_prompt=True",
        "add_generation_prompt=False",
        of("train", "test_a_chat_is_what_the_tokenizer_s_own_template_makes_of_it"),
    ),
    # ---- tasks: programs in a sandbox
    Mutant(
        "a pair of datagram sockets is allowed",
        "tasks/jail.py",
        "pair += [load_second, *when(IF_ANY_BIT, OTHER_TYPES, forbid)]",
        "pair += [load_second]",
        of("sandbox", "test_sockets_of_other_programs_are_out_of_reach"),
    ),
    Mutant(
        "a file may have another owner",
        "tasks/jail.py",
        "for command in (F_SETOWN, F_SETSIG, F_SETOWN_EX):",
        "for command in (F_SETSIG, F_SETOWN_EX):",
        of("sandbox", "test_no_signal_by_way_of_a_file"),
    ),
    Mutant(
        "the CPU limit is told as a kill",
        "tasks/jail.py",
        "(limit, limit + 1))",
        "(limit, limit))",
        of("sandbox", "test_limits_are_counted_apart"),
    ),
    Mutant(
        "a program may fork",
        "tasks/jail.py",
        "clone = [load_first, *unless(IF_ANY_BIT, CLONE_THREAD, forbid)]",
        "clone = [load_first]",
        of("sandbox", "test_the_page_says_what_is_contained"),
    ),
    Mutant(
        "a kill is nothing",
        "tasks/code.py",
        "if status in (None, signal.SIGKILL):",
        "if status is None:",
        of("sandbox", "test_a_killed_program_has_not_used_up_its_cpu_time"),
    ),
    Mutant(
        "a jail that ends early is nothing",
        "tasks/code.py",
        "return passed, None, False",
        "return passed, status, False",
        of("sandbox", "test_a_jail_that_ends_between_two_tests_is_a_crash"),
    ),
    Mutant(
        "whole numbers are compared as floats",
        "tasks/code.py",
        "return Decimal(word) == Decimal(expected)",
        "return float(word) == float(expected)",
        of("sandbox", "test_words_of_programs_are_compared"),
    ),
    Mutant(
        "a tuple is a list everywhere",
        "tasks/code_data.py",
        'label["json"] = bool(function)',
        'label["json"] = True',
        of("sandbox", "test_forms"),
    ),
    # ---- signals, and a grader that breaks
    Mutant(
        "one rank that leaves during start-up lets the others wait",
        "lib/launcher.py",
        'os._exit(int(os.environ.get("WORLD_SIZE", "1") != "1"))',
        "os._exit(0)",
        of("common", "test_a_signal_during_start_up_ends_a_rank_even_within_c"),
    ),
    Mutant(
        "a signal that comes to the start-up's thread later ends the run",
        "lib/launcher.py",
        "if callable(signal.getsignal(signal.SIGTERM)):",
        "if False:",
        of("common", "test_a_signal_that_comes_to_the_thread_of_the_start_up_later_stops_the_run"),
    ),
    Mutant(
        "ranks do not hear what is broken",
        "lib/common.py",
        'raise Stopped(text or "")',
        'raise Stopped("")',
        of("common", "test_ranks_agree_on_a_fault_of_one_of_them"),
    ),
    Mutant(
        "time-outs are forgotten",
        "reward.py",
        "self.verdicts = self.hopeless.copy()",
        "self.verdicts = {}",
        of("reward", "test_pair_that_used_up_its_cpu_time_does_so_once_in_a_run"),
    ),
    Mutant(
        "an interpreter that is gone is a traceback",
        "reward.py",
        "        except OSError as error:\n            # The others",
        "        except ChildProcessError as error:\n            # The others",
        of("reward", "test_process_that_cannot_start_is_noted_before_it_is_an_error"),
    ),
    Mutant(
        "a worker that crashed is never asked again",
        "reward.py",
        'if reply == "cpu_timeouts":',
        "if reply in LOSSES:  # all",
        of("reward", "test_pair_that_was_lost_otherwise_is_tried_again"),
    ),
    Mutant(
        "a broken grader is its rank's own affair",
        "rollout.py",
        "self.signals.agree(self.grader.broken)",
        "self.signals.agree(None)",
        of("rollout", "test_a_grader_that_is_broken_on_one_rank_stops_all"),
    ),
    Mutant(
        "signals during the imports are not heard",
        "train.py",
        "    leave_on_signals()\n",
        "",
        of("train", "test_a_signal_during_the_imports_is_one_line_and_exit_code_0"),
    ),
]
