"""train.py with a vLLM that packs the experts of a model again after a sync.

On a CPU vLLM 0.32 packs them once, at the start. After a sync its kernel reads unpacked weights.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: E402

import train  # noqa: E402

Method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod


def pack_again(method, layer, process=Method.process_weights_after_loading):
    # If the layer has no kernel, vLLM makes one and packs the experts for it.
    method.moe_kernel = None
    process(method, layer)


if __name__ == "__main__":
    Method.process_weights_after_loading = pack_again
    os._exit(train.run(sys.argv[1:]))
