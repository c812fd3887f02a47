"""train.py with a change of what it runs on. The variable CHANGE names a function of this file."""

import os
import sys

import train
from nanoorz import models
from rollout import Sampler


def shard_everything(engine_config=models.engine_config):
    """ZeRO-3 shards the small parameters too, which it keeps whole otherwise."""

    def changed(*inputs):
        settings = engine_config(*inputs)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    models.engine_config = changed


def pack_experts_again():
    """On a CPU vLLM 0.32 packs the experts of a model once, at the start. After a sync its kernel
    reads unpacked weights."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as layers

    method_class = layers.UnquantizedFusedMoEMethod
    process = method_class.process_weights_after_loading

    def pack_again(method, layer):
        # If the layer has no kernel, vLLM makes one and packs the experts for it.
        method.moe_kernel = None
        process(method, layer)

    method_class.process_weights_after_loading = pack_again


def stop_syncs(sync=Sampler.sync):
    """After SYNCS syncs the sampler gets no weights any more. The start has two, one of them by its
    check, and so has the first step."""
    left = iter(range(int(os.environ["SYNCS"])))

    def sync_or_not(sampler, weights):
        if next(left, None) is not None:
            sync(sampler, weights)

    Sampler.sync = sync_or_not


if __name__ == "__main__":
    globals()[os.environ["CHANGE"]]()
    os._exit(train.run(sys.argv[1:]))
