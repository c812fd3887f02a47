"""--compile_layers against eager layers. Each test compiles by inductor, as on a GPU."""

import pytest
import torch
from gpu_worker import distance
from ppo_worker import cell, config, gradient_of_update, make_batch, make_models, reader
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import ppo
from nanoorz import compiled
from nanoorz import models as library

PACKED = {"packing_max_len": 64, "micro_train_batch_size": 2}
# PyTorch's kernel for packed rows is there in bf16 alone.
VARLEN = {"bf16": True, "attention": "varlen", "packing_max_len": 64}
CELLS = []
for name, flags in (("fp32", PACKED), ("bf16", VARLEN)):
    CELLS.append(cell(name, "compiled", **flags, zero_stage=3, gradient_checkpointing=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    return reader([], CELLS, tmp_path_factory.mktemp("cells"), models)


@pytest.mark.slow
@pytest.mark.parametrize("name", [job["name"] for job in CELLS])
def test_gradients_on_two_ranks(name, results):
    """In fp32 they are those of eager layers. In bf16 they are as near to fp32's as those."""
    found = results(2, name)
    assert found["graphs"] in (1, 2), "policy and critic share graphs, and a row may be alone"
    for learner in ("policy", "critic"):
        eager, ours = found[learner]
        if name == "fp32":
            assert 0 < distance(ours, eager) < 1e-6
        else:
            truth, _ = results(2, "fp32")[learner]
            assert distance(ours, truth) < 1.1 * distance(eager, truth)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.engine
def test_a_run_makes_few_graphs(bf16, models, compiling):
    """Updates, passes of the critic and of log_kl, rows of all lengths, fillers, and more rows."""
    flags = PACKED | (VARLEN if bf16 else {}) | {"zero_stage": 2 if bf16 else 0}
    cfg = config(models[True], compile_layers=True, gradient_checkpointing=True, **flags)
    before = counters["stats"]["unique_graphs"]

    def graphs() -> int:
        return counters["stats"]["unique_graphs"] - before

    learners = [library.make_policy(cfg), library.make_critic(cfg)]
    counts = []
    for kind in ("one", "ragged", "equal sizes", "copies"):
        batch = make_batch(kind)
        ppo.compute_logprobs(learners[0], batch, cfg)
        ppo.forward_pass(batch, cfg, learners[1])
        ppo.compute_advantages(batch, cfg)
        for learner in learners:
            gradient_of_update(learner, batch, cfg)
        counts.append(graphs())
    for _ in range(2):
        learners[0](ppo.filler(torch.device("cpu")), 1.0)
    # One row or several, with gradients or without.
    assert counts[0] == 2 and counts[-1] == graphs() == 4
    assert not compiled.run_if_possible.has_failed


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward"])
def test_hooks_in_a_layer_are_called(kind, models, compiling):
    """A user's hook on a part of one layer, in a layer that is compiled already and in another."""
    found = {}
    batch = make_batch()
    ppo.compute_advantages(batch, config(models[True]))
    for is_compiled in (False, True):
        cfg = config(models[True], compile_layers=is_compiled, **PACKED)
        policy = library.make_policy(cfg)
        layers = policy.module.model.base_model.layers
        gradients = [gradient_of_update(policy, batch, cfg)]
        for layer in layers:

            def double(module, *tensors):
                return tuple(2 * x for x in tensors[0])

            def double_output(module, inputs, output):
                return 2 * output

            hook = double_output if kind == "forward" else double
            handle = getattr(layer.mlp, f"register_{kind}_hook")(hook)
            gradients.append(gradient_of_update(policy, batch, cfg))
            handle.remove()
        found[is_compiled] = gradients
    for eager, ours in zip(*found.values()):
        assert distance(ours, eager) < 1e-6
    assert distance(eager, gradients[0]) > 0.01


def test_after_a_graph_too_many_the_layers_are_eager(models, compiling, capsys):
    cfg = config(models[True], **PACKED)
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    policy = library.make_policy(cfg)
    expected = gradient_of_update(policy, batch, cfg)
    cfg.compile_layers = True
    policy = library.make_policy(cfg)
    with torch._dynamo.config.patch(recompile_limit=1):
        ppo.compute_logprobs(policy, batch, cfg)
        assert not capsys.readouterr().out
        found = gradient_of_update(policy, batch, cfg)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING: --compile_layers: rank 0 compiles no layer from now on: ")
    assert "limit" in line
    assert torch.equal(found, expected)


def test_without_a_compiler_the_layers_are_eager(models, compiling, capsys):
    cfg = config(models[True], compile_layers=True, **PACKED)
    batch = make_batch()
    policy = library.make_policy(cfg)
    with fresh_cache(), torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        ppo.compute_logprobs(policy, batch, cfg)
        ppo.compute_logprobs(policy, batch, cfg)
    [line] = capsys.readouterr().out.splitlines()
    assert "rank 0 compiles no layer from now on: " in line
