"""reward.py: prompts, forms of answers, grading. Equality and hostile text are in test_equal.py."""

import hashlib
import json
import os
import random
import re
import resource
import signal
import time

import pytest
from conftest import DATA, ROOT, jsonl, run_python, wait_until

import reward
from nanoorz.ranks import UserError

# ---- prompts ------------------------------------------------------------------------------------


def test_the_template_is_orz_s_to_the_letter():
    digest = hashlib.sha256(reward.TEMPLATES["orz"].encode()).hexdigest()
    assert digest[:16] == "97a7cfb2e10d7881"


def test_a_prompt_is_the_template_with_the_question(tmp_path):
    question = "What is {x} in {question} of \\boxed{} {0}?"
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": question, "answer": "1"}]))
    filled = {"Q: {question} {bos}": f"Q: {question} <s>", "demo": f"{question}<think>"}
    filled |= {"plain": question, "chat": question}
    for template, prompt in filled.items():
        [problem] = reward.load_problems(str(path), template, bos="<s>")
        assert problem.prompt == prompt
    for template in ("orzz", "{questions}"):
        with pytest.raises(UserError, match="--template .*: choose orz, demo, plain"):
            reward.load_problems(str(path), template)


# ---- answers ------------------------------------------------------------------------------------


def slow_extract(text):
    """Reference: every box is tried from the last to the first, counting braces by hand."""
    begin = re.compile(r"\\(boxed|fbox) *\{")
    head, closed, _ = text.rpartition("</answer>")
    _, opened, block = head.rpartition("<answer>")
    if not closed or not opened:
        return None
    escaped = [False] * (len(block) + 1)
    i = 0
    while i < len(block):
        box_is_near = begin.match(block, i) or begin.match(block, i + 1)
        if block[i] == "\\" and not box_is_near:
            i += 1
            escaped[i] = True
        i += 1
    for start in reversed(range(len(block))):
        box = begin.match(block, start)
        if box and not escaped[start]:
            depth = 1
            for i in range(box.end(), len(block)):
                if not escaped[i]:
                    depth += (block[i] == "{") - (block[i] == "}")
                if depth == 0:
                    return block[box.end() : i]
    return None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<think>\\boxed{1}</think> <answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed{1} so \\boxed{2}</answer> and \\boxed{3}", "2"),
        ("<answer>\\boxed{1}</answer> <answer>\\boxed{2}", "1"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{x \\}}</answer>", "x \\}"),
        ("<answer>\\boxed{1 + \\boxed{2}}</answer>", "2"),
        ("<answer>}}} {{{ \\boxed{a\nb}</answer>", "a\nb"),
        ("<answer>\\boxed{}</answer>", ""),
        ("<answer>5 \\boxed 5 boxed{5}</answer>", None),
        ("<answer>\\boxed {5}</answer>", "5"),
        ("<answer>\\boxed{4} is wrong. \\fbox{5}</answer>", "5"),
        ("</answer>\\boxed{5}<answer>", None),
        ("<answer>\\boxed{5}</answer> <answer>none</answer>", None),
    ],
)
def test_the_answer_is_the_last_balanced_box_of_the_last_closed_block(text, answer):
    assert reward.extract_answer(text) == answer == slow_extract(text)


def test_extract_answer_equals_the_slow_reference():
    pieces = ["<answer>", "</answer>", "\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "\\"]
    pieces += ["\\boxed", "x", "1", " ", "\n"]
    weights = [2, 2, 4, 2, 5] + [1] * 9
    rng = random.Random(1)
    for _ in range(6_000):
        text = "".join(rng.choices(pieces, weights, k=rng.randint(1, 25)))
        if rng.random() < 0.7:
            text = f"<answer>{text}</answer>"
        assert reward.extract_answer(text) == slow_extract(text), text


BOXES = ["{", "}", "\\boxed{", "\\", "\\boxed{1}", "\\boxed", "<answer>", "</answer>"]
NUMERALS = ["#", "1", "1,", "1,234", ".1", "-", "-1", "#### 1"]


@pytest.mark.parametrize("piece", [*BOXES, *NUMERALS, " "])
def test_an_answer_is_found_in_linear_time(piece):
    middle = piece * (300_000 // len(piece))
    if piece in ("{", "\\boxed{"):
        middle += "}" * 50_000
    start = time.process_time()
    for text in (middle, f"<answer>\\boxed{{1}}{middle}\\boxed{{2}}</answer>"):
        for form in (*reward.ANSWER_FORMS.values(), reward.last_block):
            form(text)
    assert time.process_time() - start < 8, "50,000 nested braces took seconds: quadratic?"


# {form: (how a response ends, its answer)}
ENDS = {
    "boxed_anywhere": [
        ("</think>\n\n**Final Answer**\n\n\\[\n\\boxed{18}\n\\]", "18"),
        ("The final answer is: $\\boxed{\\$18}$. I hope it is correct.", "\\$18"),
        ("First $\\boxed{9}$ eggs, then $2 \\cdot 9 = \\boxed{18}$.", "18"),
        ("<think> a guess: \\boxed{17} </think> <answer> 18 </answer>", "17"),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{18", None),
        ("#### 18", None),
        # Boxes that only a comma, "and" or "or" separates are a list.
        ("\\boxed{3}, \\boxed{5}, \\boxed{7}", "3, 5, 7"),
        ("They are $\\boxed{3}$,\n$\\boxed{5}$, and $\\boxed{3}$.", "3, 5, 3"),
        ("$x=\\boxed{3}$, $y=\\boxed{5}$", "3, 5"),
        ("\\boxed{3} \\text{ or } \\boxed{5}", "3, 5"),
        ("\\boxed{8}, \\boxed{8}", "8"),
        ("\\boxed{72}, or \\boxed{72\\text{ clips}}", "72\\text{ clips}"),
        ("First \\boxed{3}, so the sum is \\boxed{8}.", "8"),
        ("\\boxed{3}. Or rather: \\boxed{8}", "8"),
        ("\\boxed{1}, \\boxed{2, \\boxed{3}}, \\boxed{4}", "4"),
        ("\\boxed{1}, \\boxed{2}, \\boxed{3", "1, 2"),
    ],
    "last_number": [
        ("So she makes $18 every day at the farmers' market.", "18"),
        ("The answer is **$1,234.50**.", "1,234.50"),
        ("a profit of $200,000-$130,000 = $70,000.", "70,000"),
        ("it fell by 3 degrees, to -7.", "-7"),
        ("she has -$7 left", "-$7"),
        ("so x = −7", "−7"),
        ("pages 3-7", "7"),
        ("x-7", "7"),
        ("(4)-7", "7"),
        ("9 * 2 = <<9*2=18>>18 dollars", "18"),
        ("the chance is .25", ".25"),
        ("1, 2, 3,4567", "4567"),
        ("of 2,125", "2,125"),
        ("eighteen", None),
    ],
    "hashes": [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### Step 1\n9 eggs\n#### $18.00\nThat is all.", "$18.00"),
        ("**#### 18**", "18"),
        ("#### **1,234**", "1,234"),
        ("The answer is 18.", None),
        ("### 18", None),
        ("it is ####", ""),
    ],
}
CASES = [(form, *case) for form, cases in ENDS.items() for case in cases]


@pytest.mark.parametrize("form, text, answer", CASES)
def test_a_form_finds_the_answer_in_what_such_models_write(form, text, answer):
    assert reward.ANSWER_FORMS[form](text) == answer


# How a right response to a problem of GSM8K ends in each form, with the label's number in it.
GSM8K_WAYS = {
    "orz": ["{work}</think> <answer> \\boxed{{{label}}} </answer>"],
    "boxed_anywhere": ["{work}\nThe answer is $\\boxed{{{label}}}$.", "\\boxed{{\\${label}.00}}"],
    "last_number": ["{work}\nThe answer is {label}.", "So it is ${label:,} in all.", "{work}"],
    "hashes": ["{work}", "{work}\n#### ${label:,}", "Adding up:\n#### {label} dollars\n\nDone."],
}


@pytest.mark.parametrize("form", GSM8K_WAYS)
def test_known_answers_of_gsm8k_in_every_form(form):
    """Each response is right for its own problem and wrong for the next one."""
    path = DATA / "gsm8k.jsonl"
    right = []
    for line, problem in zip(jsonl(path), reward.load_problems(str(path), "plain"), strict=True):
        number = int(problem.label.replace(",", ""))
        for way in GSM8K_WAYS[form]:
            right.append((way.format(work=line["answer"], label=number), problem.label))
    following = right[1:] + right[:1]
    wrong = [(text, label) for (text, own), (_, label) in zip(right, following) if own != label]
    assert len(wrong) > 75
    expected = dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)
    with reward.Grader(2, form) as grader:
        for text, label in expected:
            grader.submit((text, label), text, "stop", label)
        assert grader.results() == expected


# ---- grading ------------------------------------------------------------------------------------


def boxed(answer):
    return f"some thought</think> <answer> it is \\boxed{{{answer}}}. </answer>"


def compare(grader, key, answer, label):
    grader.submit(key, boxed(answer), "stop", label)


def test_reward_needs_a_stop_an_answer_and_equality():
    """submit says the answer of a response that ended by itself, also a wrong one."""
    samples = {
        "right": (boxed("\\frac{1}{2}"), "stop", "0.5", "\\frac{1}{2}"),
        "truncated": (boxed("\\frac{1}{2}"), "length", "0.5", None),
        "wrong": (boxed("\\frac{1}{3}"), "stop", "0.5", "\\frac{1}{3}"),
        "none": ("I do not know</answer>", "stop", "0.5", None),
        "unclosed": ("<answer>\\boxed{0.5}", "stop", "0.5", None),
        "empty": (boxed(""), "stop", "0.5", None),
        ("any", "key"): (boxed("2x"), "stop", "x+x", "2x"),
        "number": (boxed("72"), "stop", 72, "72"),
    }
    with reward.Grader() as grader:
        for key, (text, finish_reason, label, answer) in samples.items():
            assert grader.submit(key, text, finish_reason, label) == answer
        right = {"right": 1.0, "number": 1.0, ("any", "key"): 1.0}
        assert grader.results() == dict.fromkeys(samples, 0.0) | right
        assert grader.results() == {}


def only_process(grader):
    """The process of a grader with one worker, which has a check behind it."""
    compare(grader, "start it", "x+1", "1+x")
    assert grader.results() == {"start it": 1.0}
    return grader.workers[0].process


def stop(process):
    """Before it has stopped, it may still take what is written."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@pytest.mark.engine
def test_a_check_that_uses_up_its_cpu_time_is_0_and_holds_up_no_other():
    # The limit holds although the process inherits that its signal is ignored.
    handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    with reward.Grader(workers=1, cpu_seconds=0.5) as grader:
        process = only_process(grader)
        stop(process)
        for number in range(64):
            compare(grader, number, "999999999!", "x+1")
            compare(grader, 100 + number, "x+2", "2+x")
        assert grader.pending(0) == 2, "submit returns at once, and equal pairs share a check"
        os.kill(process.pid, signal.SIGCONT)
        found = grader.results()
        assert found == {key: float(key >= 100) for key in found}
        assert (len(found), grader.lost) == (128, 1)
    signal.signal(signal.SIGPROF, handler)


@pytest.mark.engine
def test_a_lost_process_is_replaced_and_counted_and_its_pair_tried_again():
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        # 2 GiB of memory, of which a normal check needs 80 MB.
        assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (2 << 30, 2 << 30)
        # Signals to the whole group are for the trainer.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid, number)
        assert only_process(grader) is process
        stop(process)
        grader.workers[0].wall_seconds = 0.5
        compare(grader, "hung", "x+2", "2+x")
        assert grader.results() == {"hung": 0.0}
        assert (process.returncode, grader.lost) == (-signal.SIGKILL, 1)
        grader.workers[0].wall_seconds = 120.0
        compare(grader, "hung", "x+2", "2+x")
        assert grader.results() == {"hung": 1.0}
        # A process that died idle is replaced and not counted.
        process = only_process(grader)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        only_process(grader)
        assert grader.lost == 1


@pytest.mark.engine
def test_the_grader_works_beside_another_nanoorz_and_keeps_pythonpath(tmp_path):
    """The user may start it in a folder with a `nanoorz`, and PYTHONPATH may lead to packages."""
    for name in ("nanoorz", "packages"):
        (tmp_path / name).mkdir()
    (tmp_path / "nanoorz" / "__init__.py").write_text("")
    seen = tmp_path / "seen"
    (tmp_path / "packages/sitecustomize.py").write_text(f"open({str(seen)!r}, 'a').write('x')")
    (tmp_path / "sympy.py").write_text("raise ImportError")
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}/packages"}
    code = "import reward; print(reward.is_equiv('2x', 'x+x'))"
    assert run_python("-P", "-c", code, cwd=tmp_path, env=env).stdout == "True\n"
    assert seen.read_text() == "xx", "of this process and of the worker"


@pytest.mark.engine
def test_a_slow_check_does_not_hold_up_the_others():
    with reward.Grader(workers=2, cpu_seconds=120.0, wall_seconds=600.0) as grader:
        compare(grader, "slow", "999999999!", "x+1")
        for number in range(30):
            compare(grader, number, f"x+{number}", f"{number}+x")
        wait_until(lambda: grader.pending(0.1) == 1)
        assert not grader.running["999999999!", "x+1"].done()
    assert [worker.process.returncode for worker in grader.workers] == [-signal.SIGKILL] * 2


@pytest.mark.engine
def test_processes_end_with_their_parent():
    """Importing reward.py also imports none of the slow packages."""
    # The output ends with the last process that holds it.
    code = """import os, signal, sys, reward
assert not {"sympy", "math_verify", "datasets", "transformers", "vllm"} & set(sys.modules)
grader = reward.Grader()
grader.submit(0, r"<answer>\\boxed{x+1}</answer>", "stop", "1+x")
grader.results()
# A process that runs would end with its pipe.
os.kill(grader.workers[0].process.pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)"""
    run_python("-c", code, code=-signal.SIGKILL, timeout=100)


def symbolic_pairs(count):
    """Right and wrong pairs that only sympy can tell, each different: {pair: is it right?}."""
    pairs = {}
    for a in range(2, 2 + count // 8):
        pairs[f"{a}x+{3 * a}", f"{a}(x+3)"] = True
        pairs[f"{a}x+3", f"{a}(x+3)"] = False
        pairs[f"{a}+\\sqrt{{2}}", f"\\sqrt{{2}}+{a}"] = True
        pairs[f"2+\\sqrt{{{a + 1}}}", f"\\sqrt{{2}}+{a + 1}"] = False
        pairs[f"x^2+{2 * a}x+{a}^2", f"(x+{a})^2"] = True
        pairs[f"x^2+{a}^2", f"(x+{a})^2"] = False
        pairs[f"(1, 3*{a}]", f"(1, {3 * a}]"] = True
        pairs[f"[1, {3 * a}]", f"(1, {3 * a}]"] = False
    return pairs


@pytest.mark.engine
def test_verdicts_do_not_depend_on_load():
    """Neither the number of workers nor the order of the pairs changes a verdict."""
    expected = symbolic_pairs(32)
    for workers, pairs in ((1, list(expected)), (2, list(reversed(expected)))):
        with reward.Grader(workers) as grader:
            for pair in pairs:
                compare(grader, pair, *pair)
            assert grader.results() == expected
            assert grader.lost == 0


# ---- text metrics -------------------------------------------------------------------------------


def slow_repetition(text):
    words = text.split()
    grams = [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]
    repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
    return repeated / max(1, len(grams))


def test_text_metrics_are_the_repeated_4_grams_and_the_second_thoughts():
    text = "Wait, let me recheck. However, I retry; ALTERNATIVELY, wait what? however"
    assert reward.text_metrics(text) == {"repetition": 0.0, "reflection": 5.0}
    assert reward.text_metrics("a b c") == {"repetition": 0.0, "reflection": 0.0}
    rng = random.Random(4)
    for _ in range(50):
        text = " ".join(rng.choices("abc", k=rng.randint(0, 60)))
        assert reward.text_metrics(text)["repetition"] == pytest.approx(slow_repetition(text))
    reward.text_metrics("word " * 200_000)  # slow_repetition would take hours
