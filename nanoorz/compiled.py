"""--compile_layers: torch compiles the layers of policy and critic.

An eager layer starts more than a hundred kernels of a GPU, most of them for one addition or
product each. torch compiles the forward pass and the backward pass of a layer into a few kernels.
So the CPU has less to do, and the GPU moves fewer bytes.

torch makes a graph for each kind of call: with and without gradients, with one row and with
several, and for each kind of layer of a model. Policy and critic share graphs. Sizes are variables
of a graph, except for a size of 1.
"""

import functools

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.checkpoint import checkpoint

from nanoorz.ranks import UserError, one_line, print0

# A graph more is an error. torch's own limit is 8, which a run with several kinds of layers meets.
GRAPHS = 64


def compile_layers(layers, is_recomputed):
    """Lets the calls of these layers run compiled code.

    is_recomputed: the backward pass computes each layer again (gradient checkpointing).
    """
    if not layers:
        raise UserError("--compile_layers: torch finds no layers in this model; leave it out")
    torch._dynamo.config.recompile_limit = GRAPHS
    # A graph is made in a forward pass, and its backward pass may be compiled later. An error would
    # come too late then: only a forward pass can be repeated without compiled code.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for layer in layers:
        # The hooks of a layer, such as those of ZeRO-3, are outside of `forward`.
        layer.forward = functools.partial(call, layer.forward, is_recomputed)


def call(forward, is_recomputed, *inputs, **options):
    """forward(*inputs, **options), compiled. After an error of the compiler: without compiling."""
    if not call.has_failed:
        try:
            return call_compiled(forward, is_recomputed, *inputs, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            call.has_failed = True
            why = one_line(error.__cause__ or error)
            print0(f"WARNING: --compile_layers: from now on no layer is compiled: {why}")
    return call_eager(forward, is_recomputed, *inputs, **options)


call.has_failed = False


def call_eager(forward, is_recomputed, *inputs, **options):
    if not is_recomputed:
        return forward(*inputs, **options)
    # Without dropout a layer draws nothing, so no state of the random generators has to be kept.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


# The whole layer must be one graph (fullgraph). Else a limit of graphs would be hit in silence.
call_compiled = torch.compile(call_eager, fullgraph=True, dynamic=True)
