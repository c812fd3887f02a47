"""tools/evaluate.py has the numbers that a run has, and its pass@k are right."""

import itertools
import shutil

import pandas as pd
import pytest
from conftest import ROOT, jsonl, launch, run_python, run_tool

from tools import evaluate

SAMPLING = {"eval_n": 2, "eval_temperature": 0.7, "eval_top_p": 0.9}


@pytest.mark.engine
def test_a_run_gives_its_flags_its_variants_and_its_problems(tiny, tmp_path):
    """The base model has the numbers of the run at step 0, and nothing but --model is named."""
    run = tmp_path / "run"
    flags = {"max_steps": 2, "variant": ["log_ratio", "distill"], "stop": "9"}
    # --eval_temperature has the value that it would have without --temperature.
    flags |= SAMPLING | {"temperature": 0.5, "eval_temperature": 1.0}
    teacher = shutil.copytree(tiny["model"], tmp_path / "teacher")
    launch(run, **tiny | flags, teacher=teacher, teacher_weight=0.5)
    # An evaluation needs no teacher.
    shutil.rmtree(teacher)
    words = [ROOT / "tools" / "evaluate.py", run]
    told = run_python(*words, "--model", tiny["model"], "--run_dir", tmp_path / "base").stdout
    at_0 = [line for line in jsonl(run / "eval_samples.jsonl") if line["step"] == 0]
    assert jsonl(tmp_path / "base" / "eval_samples.jsonl") == at_0 and len(at_0) == 8 * 2
    [numbers] = jsonl(tmp_path / "base" / "eval.jsonl")
    assert numbers == jsonl(run / "eval.jsonl")[0]
    assert f"eval: pass@1 {numbers['accuracy']:.3f}\n" in told
    # The policy of the run, with another number of samples.
    run_python(*words, "--eval_n", "3")
    assert len(jsonl(run / "evaluation" / "eval_samples.jsonl")) == 8 * 3


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    counts = [0, 1, 3, 6]
    for k in (1, 2, 4, 6):
        draws = itertools.product(counts, itertools.combinations(range(6), k))
        has_right = [any(position < count for position in draw) for count, draw in draws]
        expected = sum(has_right) / len(has_right)
        assert evaluate.pass_at_k(pd.Series(counts), 6, k) == pytest.approx(expected)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    code, _, errors = run_tool("evaluate", tmp_path)
    assert code == 2 and "has no metrics.jsonl" in errors
