"""nanoorz/equal.py: its rules. nanoorz/algebra.py: the worker process. Both against hostile text.

tests/data/answers.txt is the contract of is_equiv: add a pair there.
"""

import json
import random
import re
import time
import tokenize
from fractions import Fraction
from itertools import product

import pytest
from conftest import DATA, jsonl, run_python

import reward
from nanoorz import equal


@pytest.fixture(scope="module")
def grader():
    with reward.Grader(workers=2) as shared:
        shared.find_answer = str  # The whole text is the answer.
        yield shared


def verdicts(grader, pairs):
    """The verdicts of pairs (prediction, label) that are all asked for at once: {pair: bool}."""
    for pair in pairs:
        grader.submit(pair, pair[0], "stop", pair[1])
    return {pair: value == 1.0 for pair, value in grader.results().items()}


# ---- the rules ----------------------------------------------------------------------------------


def test_known_answers_get_the_verdict_of_the_table(grader):
    expected = {}
    for line in (DATA / "answers.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            predicted, mark, label = re.split(" ?(!?@) ", line, maxsplit=1)
            expected[predicted, label] = mark == "@"
    found = verdicts(grader, expected)
    assert [pair for pair in expected if found[pair] != expected[pair]] == []
    assert len(expected) > 600


def examples(path) -> dict:
    """The examples in the comments and docstrings of a file: {(answer, label): is it right?}

    Four spaces, or a colon, separate them: # A root:    √4 -> 2    √4 != 3
    """
    found = {}
    with open(path, "rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    for token in tokens:
        if token.type == tokenize.COMMENT or '"""' in token.string[:4]:
            text = re.sub(r'^#|^r?"""|"""$', "", token.string)
            for part in re.split(r"\n| {4}|: (?! )", text):
                example = re.fullmatch(r"(.+?) (->|!=) (.+)", part.strip())
                if example:
                    found[example[1], example[3]] = example[2] == "->"
    return found


def test_the_examples_of_the_rules_are_true(grader):
    expected = examples(equal.__file__)
    found = verdicts(grader, expected)
    assert [pair for pair in expected if found[pair] != expected[pair]] == []
    assert len(expected) > 160


def test_words_behind_a_number_are_dropped_only_if_they_do_not_change_it():
    for line in (DATA / "words_behind_5.txt").read_text().splitlines():
        kind, _, words = line.partition(": ")
        for text in words.split("; "):
            for form in (f"5 {text}", f"5\\text{{ {text}}}"):
                assert equal.quick_verdict(form, "5") is (kind == "right"), form


# ---- all rules on many answers -----------------------------------------------------------------

REWRITES = [
    lambda x: f"  {x} ",
    lambda x: f"${x}$",
    lambda x: x + ".",
    lambda x: x.replace("\\frac", "\\dfrac"),
    lambda x: x.replace("\\dfrac", "\\tfrac"),
    lambda x: x.replace("\\left", "").replace("\\right", ""),
    lambda x: x if "\\left" in x else x.replace("(", "\\left ( ").replace(")", " \\right ) "),
    lambda x: re.sub(r"([-+=])", r" \1 ", x),
    lambda x: x if " \\frac" in x else re.sub(r"(?<![A-Za-z]) (?![A-Za-z])", "", x),
    lambda x: x.replace("^\\circ", "^{\\circ}"),
    lambda x: x.replace("^\\circ", "°"),
    lambda x: x.replace("^\\circ", ""),
    lambda x: x.replace("^\\circ", "\\text{ degrees}"),
    lambda x: x.replace("\\text", "\\mathrm").replace("\\mbox", "\\text"),
    lambda x: re.sub(r"\\(?:text|mbox)\{ ?(?:cents|cm|inches|degrees)\}(?:\^2)?", "", x),
    lambda x: re.sub(r"\^(\d)", r"^{\1}", x),
    lambda x: re.sub(r"(?<!\d)\\frac\{(\d+)\}\{(\d+)\}$", r"\1/\2", x),
    lambda x: re.sub(r",\\! ?", ",", x.replace("\\$", "")),
    lambda x: x.replace("\\pi", "π").replace("-", "−").replace("\\infty", "∞"),
    lambda x: re.sub(r"^-?\d+$", r"\g<0>\\text{ units}", x),
    lambda x: re.sub(r"^-?\d+$", r"\g<0>.0", x),
    lambda x: x if "=" in x or "\\in" in x else f"x = {x}",
]


def test_every_label_of_math_equals_itself_and_its_rewritten_forms(grader):
    labels = [problem["answer"] for problem in jsonl(DATA / "math.jsonl")]
    pairs = {(rewrite(label), label) for rewrite in REWRITES for label in labels}
    assert len(pairs) > 2_000
    found = verdicts(grader, pairs | set(zip(labels, labels)))
    assert [pair for pair, value in found.items() if not value] == []


def test_different_labels_differ():
    """Of a part of all pairs, only those that are the same number or text are equal."""
    labels = sorted({problem["answer"] for problem in jsonl(DATA / "math.jsonl")})
    mute = re.compile(r"\\[!$]|[ ,{}]|\\mbox.*|\^\\circ|^x=|_9$")
    pairs = [(a, b) for a in labels for b in labels if a < b]
    for a, b in pairs[::11]:
        if equal.quick_verdict(a, b):
            assert mute.sub("", a) == mute.sub("", b)


def spellings(value, rng):
    """Many ways to write one rational number; independent of equal.py's own parsing."""
    sign = "-" if value < 0 else ""
    top = abs(value.numerator)
    bottom = value.denominator
    scale = rng.randint(1, 9)
    yield f"{sign}\\frac{{{top * scale}}}{{{bottom * scale}}}"
    yield f"{sign}{top}/{bottom}"
    yield f"\\dfrac{{{sign}{top}}}{{{bottom}}}"
    yield f"{sign}\\frac{{{top:,}}}{{{bottom}}}\\text{{ cm}}"
    if top > bottom > 1:
        yield f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"
        yield f"{sign}{top // bottom} {top % bottom}/{bottom}"
    if 10**9 % bottom == 0:
        digits = f"{top * 10**9 // bottom:010d}"
        yield f"{sign}{digits[:-9]}.{digits[-9:]}"
        yield f"{sign}{int(digits[:-9]):,}.{digits[-9:]}"
        percent = f"{top * 10**11 // bottom:010d}"
        yield f"{sign}{percent[:-9]}.{percent[-9:]}\\%"
    if bottom == 1:
        for end in ("", ".", ".00", " km", "\\text{ apples}", "^\\circ"):
            yield f"{sign}{top:,}{end}"
        yield from (f"${value}$", f"x = {value}", f"{sign}\\${top:,}.00")


def test_numbers_are_equal_in_every_spelling_and_only_then():
    rng = random.Random(2)
    for _ in range(200):
        size = 10 ** rng.randint(1, 20)
        value = Fraction(rng.randint(-size, size), rng.choice([1, 1, 2, 3, 7, 8, 25]))
        other = value + Fraction(rng.choice([-1, 1]), rng.choice([1, 10, 7]))
        label = rng.choice(list(spellings(value, rng)))
        for text in spellings(value, rng):
            assert equal.quick_verdict(text, label) is True, (text, label)
        for text in spellings(other, rng):
            # 50% may be 50, because a percent sign may be left off.
            if "%" not in text + label:
                assert equal.quick_verdict(text, label) is False, (text, label)


def test_integers_are_exact_up_to_2500_characters_and_longer_ones_equal_only_themselves():
    big = "9" * 2_499
    assert equal.quick_verdict("0" + big, big) is True
    assert equal.quick_verdict(big[:-1] + "8", big) is False
    assert equal.quick_verdict("0" + big + "9", big + "9") is False
    assert equal.quick_verdict(big[:900], f"{int(big[:900]):,}") is True
    huge = "1" * 10**6
    assert equal.quick_verdict(huge, huge) is True
    assert equal.quick_verdict(huge, huge + "0") is False


TEXT_PIECES = r"""
\boxed{ { } <answer> </answer> \frac \frac{ \sqrt ^ _ ^{ ( ) [ ]
1 0 23 , . % \% $ \$ = x i \pi - + / * ** ! \text{ \left \right \! \
\circ ^\circ \in A (B) e5 E9 \begin{pmatrix} \\ & ~ ٣ ½ 𝟙
"""
PIECES = TEXT_PIECES.split()
PIECES += ["9" * 50, r"\text{ cm}", " cm", " ", "\n", "\x00", "\ud800", "\u202e", "\u200f"]


def test_generated_texts_never_raise():
    rng = random.Random(3)
    labels = ["42", "\\frac{1}{2}", "x = 5", "\\text{(C)}", "52_8", "(1,2]", "50\\%", ""]
    undecided = 0
    for number in range(6_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 14)))
        if number % 7 == 0:
            text = "".join(chr(rng.randrange(0x110000)) for _ in range(20))
        if number % 2:
            text = reward.extract_answer(f"<answer>\\boxed{{{text}}}</answer>") or text
        verdict = equal.quick_verdict(text, labels[number % len(labels)])
        assert verdict in (True, False, None)
        undecided += verdict is None
        assert equal.quick_verdict(text, text) is (text.strip() != ""), "a text equals itself"
    assert 0 < undecided < 6_000


ANSWER_PIECES = r"""
9 { } {a} \frac{ \text{ 1\text{a} \ $ 1, 1/ x= \! = √ ^{ (a < x< a<b a,b< 1,000, \not (, ( \{ a: a+
| \mathrm{x} \boldsymbol{ \color{a} \approx sqrt( \pi \pm x\le ' _{a} 9am 1e
-( /( 1,000() 1,000\ ; )or( \text{,or} 5pct -x<
"""
REPEATED = ANSWER_PIECES.split()
REPEATED += [" ", "1 ", "a ", "1 abcd ", "aa bb ", "1 sq ", " or ", "1 am", "not "]
REPEATED += [",", "`", "{*a* ", "1,000 "]


@pytest.mark.parametrize("piece", REPEATED)
def test_quick_verdict_takes_bounded_time(piece):
    """The decode loop waits for it. An answer of many short words once took 0.2 s."""
    start = time.process_time()
    for size in (2_400, 10**6):
        text = piece * (size // len(piece))
        for pair in ((text, "42"), ("42", text), (text, text + "1"), (text, text)):
            equal.quick_verdict(*pair)
    assert time.process_time() - start < 2


# ---- algebra and its worker process --------------------------------------------------------------

WATCHED_WORKER = """
import sys
import sympy
from nanoorz import algebra

def hook(event, args):
    if event == "compile" and any(code in str(args[0]) for code in ("zqz", "31415")):
        sys.stderr.write(f"compiled: {args[0]!r}")
    elif event == "exec" and "zqz" in repr((args[0].co_names, args[0].co_consts)):
        sys.stderr.write(f"executed: {args[0]!r}")

def clear_cache(empty=sympy.core.cache.clear_cache):
    sys.stderr.write(".")
    empty()

sympy.core.cache.clear_cache = clear_cache
sys.addaudithook(hook)
algebra.serve(5.0)
"""


@pytest.mark.engine
def test_worker_answers_each_line_empties_sympy_s_cache_and_compiles_no_text():
    """The audit hook sees each text that eval, exec or compile gets.

    sympy's cache could change the order of terms and the memory of the next check.
    """
    known = [("2x", "x+x"), ("2x", "3x"), ("\ud800", "x"), ("(" * 99, "x")]
    forms = (DATA / "code_in_answers.txt").read_text().splitlines()
    names = [r"\text{zqz(1)}", "open('zqz')"]
    hidden = {form.replace("{code}", name) for form, name in product(forms, names)}
    pairs = known + [(text, r"\pi") for text in sorted(hidden)]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = run_python("-c", WATCHED_WORKER, input=lines)
    replies = "ready\nequal\n" + "different\n" * (len(pairs) - 1)
    assert (done.stdout, done.stderr) == (replies, "." * len(pairs))


@pytest.mark.slow
def test_every_hostile_text_is_survived():
    """A line of the file holds the pieces of a text, and how often each is repeated."""
    pairs = []
    for pieces in jsonl(DATA / "hostile.jsonl"):
        text = "".join(piece * times for piece, times in pieces)
        pairs.append((text, r"2x+\sqrt{3}"))
    with reward.Grader(workers=2, cpu_seconds=0.3) as grader:
        grader.find_answer = str
        assert not any(verdicts(grader, pairs).values())
        assert grader.lost > 0
