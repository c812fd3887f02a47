"""PPO without what it does not need: engines, packing, log-probs, values, advantages, the two losses and their updates.

Never sees text. Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py, which runs this file alone:
- one denominator: a loss is a sum over response tokens divided by the *global* number of them in the optimizer step, so
  packing, micro-batches and ranks do not change the gradient (ORZ: mean of per-pack means);
- no old log-probs, reference, ratio or clip: with one update per rollout the ratio is 1 and the clip does nothing;
- the LM head works in chunks with its own backward: large (T, V) logits never exist (ORZ held four copies);
- group scores are divided by their std and not whitened again (ORZ's GRPO did neither).
Shapes: R packed rows, L row length, T response tokens, V vocabulary, H hidden, N samples.
"""
import functools
from bisect import bisect_left, insort
from dataclasses import dataclass

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig


class ChunkedLogprob(torch.autograd.Function):
    """log p(token) and entropy from hidden states, chunk by chunk; above 256 MB backward makes a chunk's scores again:
    a fourth head matmul, against T*V*4 bytes several times over (5 GB at 8k tokens and V 152k)."""
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, chunk):
        logprobs, entropy = torch.empty_like(hidden[:, 0], dtype=torch.float32).expand(2, -1).clone()  # (T,), (T,)
        ctx.kept = []
        for h, ids, logp, ent in zip(*(x.split(chunk) for x in (hidden, token_ids, logprobs, entropy))):
            scores = (nn.functional.linear(h, weight).float() / temperature).log_softmax(-1)  # (chunk, V)
            logp.copy_(scores.gather(1, ids[:, None])[:, 0])
            ent.copy_(scores.exp().mul_(scores).sum(-1).neg())  # not einsum: its fp32 sums over V are 10 times worse
            ctx.kept += [scores] * (len(hidden) * len(weight) <= 2**26)
        ctx.save_for_backward(hidden, weight, token_ids, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # entropy is mostly only logged: then its gradient is None and costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, token_ids, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)  # (T, H)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, H) fp32: many small terms are added up
        for start in range(0, len(hidden), ctx.chunk):  # d log p_y / dz = 1[y] - p; d H / dz = -p (log p + H)
            part = slice(start, start + ctx.chunk)
            logp = ctx.kept.pop(0) if ctx.kept else (
                nn.functional.linear(hidden[part], weight).float() / ctx.temperature).log_softmax(-1)  # (chunk, V)
            up = (0 * entropy if grad_logprobs is None else grad_logprobs)[part, None] / ctx.temperature  # (chunk, 1)
            down = up if grad_entropy is None else up + grad_entropy[part, None] / ctx.temperature * (
                logp + entropy[part, None])  # (chunk, V)
            grad = logp.exp_().mul_(-down).scatter_add_(1, token_ids[part, None], up).to(hidden.dtype)  # (chunk, V)
            grad_hidden[part] = grad @ weight
            accumulate = grad_weight.addmm_ if grad.dtype == torch.float32 else lambda a, b: grad_weight.add_(a @ b)
            accumulate(grad.T, hidden[part])  # fp32: in place, without a second (V, H)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


class ChunkedHead(nn.Linear):
    """The LM head as log-probs and entropies; one call a micro-batch: under ZeRO-3 a gather per chunk could hang."""
    def forward(self, hidden: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        floats = 2**27 if hidden.is_cuda else 2**23  # per chunk of logits: 512 MB on a GPU, 32 MB on a CPU
        return ChunkedLogprob.apply(hidden, self.weight, token_ids, temperature, max(16, floats // self.out_features))


class Policy(nn.Module):
    """A Hugging Face causal LM whose logits are a linear head without bias over its body's last hidden state."""
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.head = model, [model.get_output_embeddings()]  # in a list: not a second name for the parameter
        self.head[0].__class__ = ChunkedHead  # same parameter, same name, tied or not

    def forward(self, rows: "MicroBatch", temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the rows' response tokens, (T,) and (T,), at the sampling temperature."""
        body = self.model.base_model(rows.input_ids, position_ids=rows.position_ids, use_cache=False)
        return self.head[0](body.last_hidden_state[rows.predict], rows.token_ids, temperature)  # (T,), (T,)


class Critic(nn.Module):
    """A full separate body and a linear head H -> 1 without bias, from N(0, std 1/(H+1)): ORZ's code, not its paper."""
    def __init__(self, model: nn.Module, seed: int):
        super().__init__()
        self.model, hidden = model, model.config.hidden_size
        self.value_head = nn.Linear(hidden, 1, bias=False, dtype=model.dtype)
        random = torch.randn((1, hidden), generator=torch.Generator().manual_seed(seed))  # (1, H)
        self.value_head.weight.data.copy_(random / (hidden + 1))

    def forward(self, rows: "MicroBatch") -> Tensor:
        """V(s_t) of the rows' response tokens, (T,), read from the state *before* each token."""
        body = self.model(rows.input_ids, position_ids=rows.position_ids, use_cache=False)
        return self.value_head(body.last_hidden_state[rows.predict]).squeeze(-1).float()  # (T,)


def engine_config(cfg, stage: int) -> dict:
    """DeepSpeed's settings: every key overrides a default that would change the mathematics."""
    return {"train_micro_batch_size_per_gpu": 1,  # a required name; our sizes vary, losses are divided by token counts
            "gradient_clipping": cfg.max_norm,  # silent default: 1.0
            "zero_optimization": {"stage": stage, "memory_efficient_linear": False,  # True patches vLLM's F.linear too
                                  "stage3_param_persistence_threshold": cfg.zero3_persistence_threshold},
            "bf16": {"enabled": cfg.bf16 and stage > 1},  # at stage 0 only a reference, which is bf16 already
            "data_types": {"grad_accum_dtype": "fp32"},  # bf16 sums lose a ninth of the norm over 65 micro-batches
            "communication_data_type": "fp32", "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}


def load_body(cfg, auto_class) -> nn.Module:
    """The model folder's weights in the training dtype, dropout off: a dropped unit would break ratio = 1."""
    shards = cfg.zero_stage == 3 and HfDeepSpeedConfig(engine_config(cfg, 3))  # noqa: F841  no rank holds a whole model
    model = auto_class.from_pretrained(cfg.model, dtype=torch.bfloat16 if cfg.bf16 else torch.float32,
                                       attn_implementation=cfg.attention)
    for module in model.modules():  # nn.Dropout has p; attention layers have a number that they pass on
        vars(module).update({name: 0.0 for name in ("p", "attention_dropout") if name in vars(module)})
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()  # from_pretrained leaves eval mode, where checkpointing is silently off


ADAMW = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def make_engine(module: nn.Module, cfg, lr: float | None, optimizer_class=ADAMW):
    """A DeepSpeed engine; lr None: without optimizer, ZeRO 3 or none. Tests pass SGD, whose step shows the gradient."""
    stage = cfg.zero_stage if lr is not None or cfg.zero_stage == 3 else 0
    optimizer = None if lr is None else optimizer_class(module.parameters(), lr=lr)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=engine_config(cfg, stage))[0]


def make_policy(cfg, trained: bool = True):
    """The policy; untrained, it is `--log_kl`'s reference: sharded under ZeRO-3, else a copy per rank."""
    return make_engine(Policy(load_body(cfg, AutoModelForCausalLM)), cfg, cfg.actor_learning_rate if trained else None)


def make_critic(cfg):
    """The critic starts from the base model's body."""
    return make_engine(Critic(load_body(cfg, AutoModel), cfg.seed), cfg, cfg.critic_learning_rate)


def named_weights(engine):
    """Yields (Hugging Face name, full tensor) on every rank, one parameter gathered at a time; do not keep the tensors.
    A tied head is named too: vLLM on a CPU would silently keep the old one."""
    params = list(engine.module.named_parameters())
    if isinstance(engine.module, Policy) and engine.module.model.config.tie_word_embeddings:
        params.append(("lm_head.weight", engine.module.model.get_input_embeddings().weight))
    for name, param in params:
        with GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            yield name.removeprefix("model."), param.data


@dataclass
class Batch:
    """A whole rollout, the same on every rank. In flat token tensors sample i owns start[i] to start[i] + length[i]."""
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    groups: Tensor  # (N,) which problem a sample answers
    rewards: Tensor  # (N,) float64
    tokens: dict[str, Tensor]  # each (T,): values, advantages, returns, logprobs (the sampler's), ref_logprobs

    def __post_init__(self):
        self.length = torch.tensor([len(ids) for ids in self.response_ids])  # (N,)
        self.start = self.length.cumsum(0) - self.length  # (N,)
        self.size = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]  # tokens of each sample
        self.mask = torch.arange(int(self.length.max())) < self.length[:, None]  # (N, longest), from lengths alone


@dataclass
class MicroBatch:
    """R rows of packed samples, and which of their positions predict a response token."""
    input_ids: Tensor  # (R, L)
    position_ids: Tensor  # (R, L) restarts at 0 with each sample: that is what isolates them from each other
    predict: Tensor  # (R, L) bool: the next token is a response token
    token_ids: Tensor  # (T,) those next tokens
    index: Tensor  # (T,) where they live in the batch's flat token tensors
    weight: Tensor  # (T,) 1; 0 for the filler of a rank that has run out of samples


def deal(sizes: list[int], samples: list[int], world: int) -> list[list[int]]:
    """Samples over ranks, longest first to the lightest rank: within 2 % of even from 32 samples per rank on."""
    loads, dealt = [0] * world, [[] for _ in range(world)]
    for i in sorted(samples, key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += sizes[i]
    return dealt


def pack(sizes: list[int], samples: list[int], row_len: int) -> list[list[int]]:
    """Best-fit decreasing: each sample goes into the fullest row that still has room for it."""
    rows, rooms = [], []  # rooms: sorted (tokens left, row)
    for i in sorted(samples, key=lambda i: (-sizes[i], i)):
        k = bisect_left(rooms, (sizes[i],))
        room, row = rooms.pop(k) if k < len(rooms) else (row_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - sizes[i], row))
    return rows


def build_rows(batch: Batch, rows: list[list[int]], device) -> MicroBatch:
    """Tensors of some packed rows; [[]] makes a filler: one token of weight 0 through body and head."""
    longest = max(1, *(sum(batch.size[i] for i in row) for row in rows)) if rows[0] else 1
    input_ids = np.zeros((len(rows), longest), dtype=np.int64)  # (R, L)
    position_ids = np.tile(np.arange(longest), (len(rows), 1))  # (R, L)
    predict = np.zeros((len(rows), longest), dtype=bool)  # (R, L)
    token_ids, index = [], []
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            end, response = at + batch.size[i], batch.response_ids[i]
            input_ids[r, at:end] = batch.prompt_ids[i] + response
            predict[r, end - len(response) - 1:end - 1] = True
            token_ids += response
            index.append(np.arange(batch.start[i], batch.start[i] + len(response)))
            at = end
            position_ids[r, at:] = np.arange(longest - at)  # the next sample, or the padding as a segment of its own
    weight = np.full(max(1, len(token_ids)), bool(token_ids), dtype=np.float32)  # (T,)
    if not token_ids:
        predict[0, 0], token_ids, index = True, [0], [np.array([0])]
    arrays = input_ids, position_ids, predict, np.array(token_ids), np.concatenate(index), weight
    return MicroBatch(*(torch.from_numpy(array).to(device) for array in arrays))


def micro_batches(batch: Batch, samples: list[int], cfg, device) -> list[MicroBatch]:
    """This rank's share of `samples`; [] on all ranks when there is nothing to do. Every rank gets the same number of
    micro-batches, since ZeRO's collectives must match: fillers where it runs out."""
    mine = deal(batch.size, samples, dist.get_world_size())[dist.get_rank()]
    many, row_len = cfg.micro_train_batch_size, cfg.packing_max_len
    if cfg.attention == "flash_attention_2":  # isolates samples only at batch size 1: one row of the same size
        many, row_len = 1, many * row_len
    rows = pack(batch.size, mine, row_len)
    micros = [rows[k:k + many] for k in range(0, len(rows), many)]
    most = torch.tensor(len(micros), device=device)  # ()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    micros += [[[]]] * (int(most) - len(micros))
    return [build_rows(batch, rows, device) for rows in micros]


# HACK HERE: an estimator maps rewards (N,), values (N, T), mask (N, T), groups (N,) to advantages (N, T); float64, CPU.
def gae(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438, eq. 16)."""
    reward = torch.zeros_like(values).scatter_(1, mask.sum(1, keepdim=True) - 1, rewards[:, None])  # (N, T) on the last
    advantages, carry, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        carry = reward[:, t] + cfg.gamma * next_value - values[:, t] + cfg.gamma * cfg.lambd * carry  # (N,)
        advantages[:, t], next_value = carry, values[:, t]
    return advantages


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group population std for all tokens alike; exactly 0 in a flat group (arXiv 2402.03300)."""
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, (rewards - mean) / std, 0.0)[:, None] * mask


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of the *other* samples of the group = (r - mean) * n / (n - 1) (arXiv 2402.14740)."""
    mean, std, count = group_stats(rewards, groups)  # (N,), (N,), (N,)
    return torch.where(std > 0, (rewards - mean) * count / (count - 1), 0.0)[:, None] * mask


def reinforce(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean over the batch of samples (Williams 1992 with a constant baseline)."""
    return (rewards - rewards.mean())[:, None] * mask


ESTIMATORS = {"gae": gae, "grpo": grpo, "rloo": rloo, "reinforce": reinforce}


def group_stats(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population std and size of each sample's group, (N,) each; std is exactly 0 where all rewards are equal."""
    _, inverse, count = groups.unique(return_inverse=True, return_counts=True)  # (N,), (groups,)
    zeros = torch.zeros(len(count), dtype=rewards.dtype)  # (groups,)
    mean = (zeros.index_add(0, inverse, rewards) / count)[inverse]  # (N,)
    std = (zeros.index_add(0, inverse, (rewards - mean) ** 2) / count).sqrt()[inverse]  # (N,)
    return mean, std.where(std > 1e-9, 0.0), count[inverse]  # a flat group's std is rounding only


def compute_advantages(batch: Batch, cfg, device, kept: list[int] | None = None) -> dict[str, float]:
    """Adds `advantages` and `returns` (T,) to the batch; gae and reinforce are whitened over all tokens of the samples
    `kept` for the loss, absent: all (the others still count in their group's mean). Returns means over the same."""
    values = torch.zeros(batch.mask.shape, dtype=torch.float64)  # (N, longest)
    if "values" in batch.tokens:
        values[batch.mask] = batch.tokens["values"].double().cpu()
    advantages = ESTIMATORS[cfg.estimator](batch.rewards, values, batch.mask, batch.groups, cfg)[batch.mask]  # (T,)
    returns = advantages + values[batch.mask]  # (T,) the critic's target, before whitening
    samples = torch.tensor(kept or range(len(batch.size)))  # (kept,)
    used = torch.isin(torch.arange(len(batch.size)), samples).repeat_interleave(batch.length)  # (T,) bool
    left, spread = (returns - values[batch.mask])[used].var(correction=0), returns[used].var(correction=0)
    if cfg.advantage_normalization and cfg.estimator in ("gae", "reinforce"):
        advantages = (advantages - advantages[used].mean()) / advantages[used].var(correction=0).sqrt().clamp(min=1e-8)
    batch.tokens |= {"advantages": advantages.float().to(device), "returns": returns.float().to(device)}
    critic = {"explained_variance": (1 - left / spread).item()} if "values" in batch.tokens and spread > 0 else {}
    return critic | {"advantage": advantages[used].mean().item(), "return": returns[used].mean().item(),
                     "advantage_abs": advantages[used].abs().mean().item()}


@torch.no_grad()
def token_pass(batch: Batch, cfg, device, forward) -> Tensor:
    """One number per response token from `forward(rows)`, (T,), the same on every rank: values, reference log-probs."""
    out = torch.zeros(int(batch.length.sum()), device=device)  # (T,)
    for rows in micro_batches(batch, list(range(len(batch.size))), cfg, device):
        out.index_add_(0, rows.index, forward(rows) * rows.weight)
    dist.all_reduce(out)  # each token was computed by exactly one rank; the others add 0
    return out


def policy_loss(engine, batch: Batch, rows: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """-sum A_t log p(a_t): the gradient of the clipped ratio objective at ratio 1 (arXiv 1707.06347, eq. 7)."""
    logprobs, entropy = engine(rows, cfg.temperature)  # (T,), (T,)
    weight, stats = rows.weight * batch.tokens["advantages"][rows.index], {}  # (T,)
    if "logprobs" in batch.tokens:  # trainer against sampler: 1 up to rounding, or something is wrong; before the cap
        log_ratio = (logprobs.detach() - batch.tokens["logprobs"][rows.index]) * rows.weight  # (T,)
        ratio = log_ratio.exp()  # (T,)
        stats = {"ratio": (ratio * rows.weight).sum(), "clipfrac": ((ratio - 1).abs() > 0.2).float().sum(),
                 "approx_kl": (ratio - 1 - log_ratio).sum(), "approx_kl_k1": -log_ratio.sum(), "ratio_max": ratio.max()}
        if cfg.tis_cap is not None:  # truncated importance weights for what the sampler's kernels did differently
            weight = weight * ratio.clamp(max=cfg.tis_cap)  # (T,)
    loss = -(weight * logprobs).sum()
    stats |= {"policy_loss": loss.detach(), "entropy": (entropy.detach() * rows.weight).sum()}
    if cfg.log_kl:  # the k3 estimator against the base model; a number only, never in the loss
        delta = (batch.tokens["ref_logprobs"][rows.index] - logprobs.detach()) * rows.weight  # (T,)
        stats["kl"] = (delta.exp() - 1 - delta).sum()
    return loss, stats


def critic_loss(engine, batch: Batch, rows: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """0.5 max((V - R)^2, (clip(V, V_old +- 0.2) - R)^2), summed over tokens (ORZ's ValueLoss)."""
    values = engine(rows)  # (T,)
    if cfg.fuse_values:  # this pass gives the values too: the critic has not learnt from these samples yet
        batch.tokens["values"].index_add_(0, rows.index, values.detach() * rows.weight)
    old, returns = batch.tokens["values"][rows.index], batch.tokens["returns"][rows.index]  # (T,), (T,)
    clipped = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)  # (T,)
    loss = 0.5 * (torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * rows.weight).sum()
    return loss, {"critic_loss": loss.detach(), "values": (values.detach() * rows.weight).sum()}


def update(engine, loss_fn, batch: Batch, samples: list[int], cfg, lr: float, device,
           report=lambda totals, share: None) -> dict[str, float]:
    """One optimizer step over `samples`, dealt to all ranks. Returns global means per token, `grad_norm` and `lr`.
    The denominator counts every response token; samples of zero advantage are then left out of the policy's passes.
    With nothing left there is no step. `report(totals, share done)` is called after each micro-batch."""
    denominator = int(batch.length[samples].sum())
    if loss_fn is policy_loss:
        advantages = batch.tokens["advantages"].cpu().split(batch.length.tolist())  # N of (length,)
        samples = [i for i in samples if advantages[i].any()]
    micros, totals = micro_batches(batch, samples, cfg, device), {}
    engine.optimizer.param_groups[0]["lr"] = lr  # there is only this group
    for k, rows in enumerate(micros):
        engine.set_gradient_accumulation_boundary(k == len(micros) - 1)
        loss, stats = loss_fn(engine, batch, rows, cfg)
        # DeepSpeed averages gradients over ranks: times their number makes it a sum over all tokens of the step
        engine.backward(loss * (dist.get_world_size() / denominator), scale_wrt_gas=False)
        for key, x in stats.items():
            totals[key] = torch.maximum(x, totals.get(key, x)) if key.endswith("_max") else totals.get(key, 0) + x
        if k < len(micros) - 1:
            engine.step()  # only counts the micro-batch
        report(totals, (k + 1) / len(micros))
    stats = checked_step(engine, totals, denominator, int(batch.length[samples].sum())) if micros else {"grad_norm": 0}
    return stats | {"lr": lr, "micro_batches": len(micros), "tokens": sum(batch.size[i] for i in samples)}


def checked_step(engine, totals: dict[str, Tensor], denominator: int, passed: int) -> dict[str, float]:
    """The optimizer's step if loss and gradient are finite, else FloatingPointError on all ranks, weights unchanged.
    Losses are means over the denominator, other numbers over the tokens that went through the model."""
    packed, stage, norm = torch.stack(list(totals.values())).double(), engine.zero_optimization_stage(), 0.0  # (stats,)
    most = packed.clone()  # (stats,)
    dist.all_reduce(packed)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    stats = {key: peak if key.endswith("_max") else x / (denominator if key.endswith("loss") else passed)
             for key, x, peak in zip(totals, packed.tolist(), most.tolist())}
    if stage == 0:  # would apply a NaN; its reduced gradients are in plain sight
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None]).item()
    skipped = engine.skipped_steps
    if np.isfinite([norm, *stats.values()]).all():
        engine.step()
        norm = float(engine.get_global_grad_norm()) if stage else norm
    if engine.skipped_steps > skipped or not np.isfinite([norm, *stats.values()]).all():  # ZeRO 1-3 skip silently
        raise FloatingPointError(f"{type(engine.module).__name__}: loss or gradient not finite: {stats}, norm {norm}")
    return stats | {"grad_norm": norm}
