"""A library of test_plan.py: the memory that a real pass requests, and a copy of CUDA's allocator.

The tensors of an eager pass have no data, so the pass needs no GPU. Memory that a kernel allocates
for itself is not seen, and tensors of at most 1 MB are left out. All sizes are in bytes.
"""

import json
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from conftest import config as make_config
from ppo_worker import batch_of_lists
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM

import ppo
from nanoorz import models
from nanoorz.compiled import compile_layers
from nanoorz.families import Plain
from nanoorz.head import ChunkedHead

MB = 2**20


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class CachingAllocator:
    """torch's CUDACachingAllocator: one stream, default settings, requests of more than 1 MB."""

    def __init__(self, card=math.inf):
        self.card = card
        self.used = {}  # {number of the request: (address, size)}
        self.free_blocks = {}  # {address: size}
        self.segments = {}  # {address: size} of what the driver gave. Blocks are parts of segments.
        self.peak_allocated = self.peak_reserved = 0

    def allocate(self, number: int, size: int):
        """Takes the smallest free block that has room. Raises MemoryError if the card is full."""
        size = round_up(size, 512)
        fitting = [(room, address) for address, room in self.free_blocks.items() if room >= size]
        room, address = min(fitting) if fitting else self.new_segment(size)
        self.free_blocks.pop(address, None)
        # A block is not split if the rest has at most 1 MB.
        if room - size > MB:
            self.free_blocks[address + size] = room - size
            room = size
        self.used[number] = address, room
        allocated = sum(room for _, room in self.used.values())
        self.peak_allocated = max(self.peak_allocated, allocated)

    def new_segment(self, size: int) -> tuple[int, int]:
        room = 20 * MB if size < 10 * MB else round_up(size, 2 * MB)
        if sum(self.segments.values()) + room > self.card:
            # torch returns the segments without a used block to the driver, and tries once more.
            whole = [x for x, room in self.free_blocks.items() if self.segments.get(x) == room]
            for address in whole:
                del self.free_blocks[address], self.segments[address]
        if sum(self.segments.values()) + room > self.card:
            raise MemoryError
        # The gap keeps the blocks of two segments apart.
        address = MB + max((start + length for start, length in self.segments.items()), default=0)
        self.segments[address] = room
        self.peak_reserved = max(self.peak_reserved, sum(self.segments.values()))
        return room, address

    def free(self, number: int):
        """Joins the block with the free blocks behind and before it."""
        address, size = self.used.pop(number)
        size += self.free_blocks.pop(address + size, 0)
        for start in [x for x, room in self.free_blocks.items() if x + room == address]:
            size += self.free_blocks.pop(start)
            address = start
        self.free_blocks[address] = size


class Tracker(TorchDispatchMode):
    """Records the life of each new storage: (number, size) at its start, (number, 0) at its end."""

    def __init__(self, known):
        """known: tensors that are not recorded."""
        super().__init__()
        self.events = []
        self.seen = WeakIdKeyDictionary({tensor.untyped_storage(): 0 for tensor in known})

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage, number = tensor.untyped_storage(), len(self.events)
                if storage not in self.seen and storage.nbytes() > MB:
                    self.seen[storage] = number
                    self.events.append((number, storage.nbytes()))
                    weakref.finalize(storage, self.events.append, (number, 0))
        return result


def replay(events, card=math.inf) -> CachingAllocator:
    """Returns the allocator of a card after these events. Raises MemoryError."""
    allocator = CachingAllocator(card)
    for number, size in events:
        if size:
            allocator.allocate(number, size)
        else:
            allocator.free(number)
    return allocator


def micro_batch(length: int) -> ppo.MicroBatch:
    """One row of one sample with one prompt token, without data.

    `predict` has indices, as indexing by a mask computes them. A mask without data has no count.
    """
    ids = torch.empty((1, length), dtype=torch.int64, device="meta")  # (1, L)
    tokens = ids[0, 1:]  # (M,)
    borders = torch.empty(2, dtype=torch.int32, device="meta")  # (2,)
    return ppo.MicroBatch(ids, ids, tokens, tokens, tokens, tokens.float(), borders, length)


def make_module(shape, has_head: bool, device):
    """A policy or a critic with random weights in bf16, and the function of its loss."""
    AttentionInterface.register("varlen", models.packed_attention)
    auto_class = AutoModelForCausalLM if has_head else AutoModel
    with torch.device(device):
        body = auto_class.from_config(shape, dtype=torch.bfloat16, attn_implementation="varlen")
    family = Plain(None)
    module = models.Policy(body, family) if has_head else models.Critic(body, family, seed=1)
    module = module.to(device).train()
    for parameter in module.parameters():
        # DeepSpeed takes the gradient at once.
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    cfg = make_config(bf16=True)
    return module, cfg.policy_loss if has_head else cfg.critic_loss


def events_of_pass(shape, checkpointing: bool, row_lengths, has_head: bool) -> list:
    """The requests for memory of the forward and backward passes of these rows, one by one.

    shape: the model's config. has_head: of the policy and its loss. Otherwise of the critic.
    """
    numbers = torch.empty(sum(row_lengths), device="meta")  # (T,)
    batch = SimpleNamespace(per_token=dict.fromkeys(["values", "returns", "advantages"], numbers))
    module, compute_loss = make_module(shape, has_head, "meta")
    if checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    # The chunk of a GPU.
    chunk = mock.patch.object(ChunkedHead, "chunk_size", lambda head, _: 2**27 // len(head.weight))
    with chunk, Tracker([*module.parameters(), *module.buffers()]) as tracker:
        for length in row_lengths:
            loss, _ = compute_loss(module, batch, micro_batch(length))
            loss.backward()
    return tracker.events


def events_of_compiled_pass(shape, checkpointing: bool, row_lengths, path) -> list:
    """Those of a critic with compiled layers. torch's profiler sees them on a CPU, where all
    tensors have data. path: of a file for the profile."""
    module, compute_loss = make_module(shape, False, "cpu")
    compile_layers(models.layers_of(module), checkpointing)

    def run(length: int) -> None:
        # Short samples, because the attention of kernels.py has all scores of a sample in memory.
        batch = batch_of_lists([[1]] * (length // 32), [[1] * 31] * (length // 32))
        numbers = torch.ones(int(batch.response_lengths.sum()))  # (T,)
        batch.per_token = dict.fromkeys(["values", "returns", "advantages"], numbers)
        loss, _ = compute_loss(module, batch, ppo.build_rows(batch, [batch.all_indices()]))
        loss.backward()

    run(64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for length in row_lengths:
            run(length)
    found.export_chrome_trace(str(path))
    traced = [x for x in json.loads(path.read_text())["traceEvents"] if x["name"] == "[memory]"]
    events = []
    numbers = {}  # {address: the number of its request}
    for event in sorted(traced, key=lambda x: x["ts"]):
        address = event["args"]["Addr"]
        size = event["args"]["Bytes"]
        if size > MB:
            numbers[address] = len(events)
            events.append((len(events), size))
        elif address in numbers and size < 0:
            events.append((numbers.pop(address), 0))
    return events
