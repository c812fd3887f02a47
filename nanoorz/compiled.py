"""--compile_layers: torch compiles the layers of policy and critic.

A layer that is not compiled starts more than a hundred kernels of a GPU, most of them for one
addition or product each. torch compiles the forward pass and the backward pass of a layer into
fewer kernels. So the CPU has less to do, and the GPU moves fewer bytes. For a model of 30 M
parameters on a CPU torch took 134 s to compile the body, and an update then took 0.93 to 1.10 times
as long as without the compiler.

torch makes a graph for each kind of call: with and without gradients, with one row and with
several, and for each kind of layer of a model. Policy and critic share graphs. Sizes are variables
of a graph, except for a size of 1.
"""

import functools

import torch
import torch.distributed as dist
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.checkpoint import checkpoint

from nanoorz.ranks import UserError, one_line

# If a run needs more graphs, its layers are no longer compiled. torch's own limit of 8 would be too
# low for a model with several kinds of layers.
MOST_GRAPHS = 64


def run_layer(forward, is_recomputed, *inputs, **options):
    """Calls the forward method of a layer. The arguments are those of compile_layers and of the
    layer."""
    if not is_recomputed:
        return forward(*inputs, **options)
    # Without dropout a layer draws nothing, so no state of the random generators has to be kept.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


# The compiled function. With fullgraph torch raises an error if it cannot compile the whole layer,
# and if there are too many graphs. Without it torch would stop compiling, and nobody would be told.
run_compiled = torch.compile(run_layer, fullgraph=True, dynamic=True)


def run_if_possible(*arguments, **options):
    """Calls run_compiled. After the first error of the compiler it always calls run_layer.

    One rank alone may have such an error. This is no fault, because a layer has no collectives:
    those of ZeRO-3 are in hooks around `forward`.
    """
    if not run_if_possible.has_failed:
        try:
            return run_compiled(*arguments, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            run_if_possible.has_failed = True
            told = f"rank {dist.get_rank()} compiles no layer from now on"
            why = one_line(error.__cause__ or error)
            print(f"WARNING: --compile_layers: {told}: {why}", flush=True)
    return run_layer(*arguments, **options)


run_if_possible.has_failed = False


def compile_layers(layers, is_recomputed):
    """Lets these layers run compiled code. Raises UserError if there are none.

    is_recomputed: the backward pass computes each layer again (gradient checkpointing).
    """
    if not layers:
        raise UserError(
            "--compile_layers: transformers does not mark the layers of this model; leave it out"
        )
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # A layer with a hook on one of its parts needs a graph of its own. By default torch would run
    # the graph of another layer.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    # torch compiles the backward pass of a graph together with the forward pass. By default it may
    # do so in the first backward pass, where run_layer could no longer replace the layer.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for layer in layers:
        layer.forward = functools.partial(run_if_possible, layer.forward, is_recomputed)
