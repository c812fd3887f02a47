"""Are two answers the same? The rules that decide, and the worker process that may die of it.

`quick_verdict` applies cheap rules in linear time. What they leave open is algebra, which
`symbolic_verdict` leaves to math-verify. That may hang, crash or eat memory, so it runs in worker
processes (`Worker` is one as its parent sees it, `serve` is what it does).

Of math-verify only the grammar and `verify` are used. Its `parse`, which Open-Reasoner-Zero calls,
takes m, h, c and ab for units (2m = 2), lower-cases symbols (R^2 - r^2 = 0) and gives plain
expressions to sympy's parse_expr, which evaluates them. Model text must never be evaluated.

A worker alone: `echo '["2x", "x+x"]' | python lib/equal.py --worker 5` prints r1.
"""

import contextlib
import json
import os
import re
import signal
import sys
from fractions import Fraction
from multiprocessing.connection import wait
from subprocess import PIPE, Popen

# A longer answer equals only itself. A shorter one fits, as JSON, into a pipe's 64 KB.
MAX_TEXT = 2_500  # characters

# ---- spellings: different ways to write the same thing, brought to one -------------------------

LATEX = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "°": r"^\circ ",
    "∪": r"\cup ",
    "²": "^2",
    "³": "^3",
}
UNICODE_TO_LATEX = str.maketrans(LATEX)

# Applied in this order. All of them take a few milliseconds for the longest text.
REWRITES = (
    # Invisible marks, sizes, styles, colours, negative spaces and dollar signs say nothing.
    (
        r"[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]|\\!\s*|\\?\$|^\s*\\approx"
        r"|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|(?<=\\)[dtc](?=frac(?![A-Za-z]))"
        r"|\\(?:displaystyle|[lL]arge|bf|(?:text)?color ?\{[a-z]+\})(?![A-Za-z])"
        # Nor does base 10.
        r"|(?<=[0-9])_(?:10|\{10\})(?=\W*$)",
        "",
    ),
    (r"\\(?:boldsymbol|bm|math(?:bf|it|sf)|underline|boxed) ?(?:\{([A-Za-z])\}|(?=\{))", r"\1"),
    (r"^\\[\[(]((?:(?!\\[()\[\]]).)*)\\[\])]$", r"\1"),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+", " "),
    # An upright letter is a symbol, but for those that are units.
    (r"\\mathrm ?\{(?![mgshACFJKLNVW])([A-Za-z])\}", r"\1"),
    (r"\\(?:mathrm|mbox|text(?:bf|it|rm|normal)) ?(?=\{)", r"\\text"),
    # Braces around all of it go, and \text{} around a number with its unit.
    (r"^ ?(?:\\text ?\{ ?(?=-?[0-9])|\{)((?:[^{}]|\{[^{}]*\})*)\} ?$", r"\1"),
    # So do brackets around a number alone.
    (r"^ ?(?:\\\{|\() ?(-?[0-9.]+) ?(?:\\\}|\)) ?$", r"\1"),
    (r"(?<=[0-9]) ?(?:\\text\{ ?)?([AaPp])\.? ?[Mm](?![A-Za-z])\.? ?\}?$", r"\1m"),
    (r"\^ ?(?:\{ ?\\(?:circ|degree) ?\}|\\circ)(?![A-Za-z])(?: ?[CF]$)?|\\degree(?![A-Za-z])", ""),
    (r"\\%| ?\\text\{ ?(?:percent|\\?%) ?\}| ?(?<![A-Za-z])percent(?![A-Za-z])", "%"),
    (r",? ?\\text\{ ?(?:or|and) ?\} ?|,? (?:or|and) ", ", "),
    (r"√ ?([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z\\])(pi|sqrt)(?![A-Za-z])", r"\\\1"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\(frac|sqrt(?:\[[0-9]\])?) ?([0-9A-Za-z]|\\pi(?![A-Za-z])|\([^()]*\))", r"\\\1{\2}"),
    (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
    (r"([\^_]) ?\{ ?([0-9A-Za-z]) ?\}", r"\1\2"),
    # "3 1/2" and "1, 234" keep their spaces, because they are not 31/2 and 1234.
    (r"(?<![0-9A-Za-z,]) +| +(?![0-9A-Za-z])", ""),
    # Outside of brackets 2,304 is a number, but (2,304) is a pair.
    (
        r"(?<![0-9,.])([1-9][0-9]{0,2})(?:,|\{,\})([0-9]{3})(?:,([0-9]{3}))?"
        r"(?:,([0-9]{3}))?(?![0-9,])(?!.*(?:[)\]]|\\\}))",
        r"\1\2\3\4",
    ),
)

DIGITS = (
    r"(?:(?:[1-9][0-9]{0,2}(?:(?:[, ]|\{,\})[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3})?"
)
FRACTION = re.compile(rf"\\frac\{{([+-]?{DIGITS})\}}\{{([+-]?{DIGITS})\}}")
NUMBER = re.compile(
    r"[£€]?(?P<sign>[+-]?) ?[£€]?(?:(?P<whole>[0-9]+) (?=[0-9.]+/))?"
    rf"(?P<top>[+-]?{DIGITS})(?:[/:](?P<bottom>[+-]?{DIGITS}))?(?P<percent>%?)"
)
# 2^10, 3\times10^{-3}, \sqrt{16} and \sqrt[3]{8} are numbers that algebra has to work out.
POWER_OR_ROOT = re.compile(
    r"[+-]?(?:(?:[0-9.]+(?:\\times|\\cdot|\*) ?)?[0-9.]+\^(?:[0-9]|\{-?[0-9]+\})"
    r"|\\sqrt(?:\[[0-9]\])?\{[0-9.]+\})"
)

# Behind a number, the field leaves off \text{}, words and units that do not change the value.
CHANGES_THE_VALUE = (
    r"(?i:[0-9,]|\b(?:is|if|when|or|for|not|than|mod|base|more|less|least|most|dozens?|(?-i:k)|"
    r"(?:hundred|thousand|[mbt]r?illion)(?:th)?s?|half|halves|thirds?|quarters?|"
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf)ths?|[a-z]+(?:teen|tie)ths?|squared|cubed|"
    r"root|factorial|negative|"
    r"plus|minus|times|divided|over|choose|below|above|under|north|south|east|west)\b)"
)
# Short units are listed, because "5 abc" is a product; a word has four letters or more.
UNIT = (
    r"[mck]m|in|f(?:oo|ee)?t|[mk]g|lb|ml|sec|min|hr|day|deg|mph|m/s|km/h|way|st|nd|rd|th|"
    r"oz|mi|yd|gal|yr|cup|men|USD|per [a-z]{1,16}|"
    r"[A-Za-z][a-z]{3,16}(?:[ /][a-z]{1,16}){0,3}"
)
UNITS = re.compile(
    rf"(?: ?(?<=[0-9A-Za-z}})% ])\\text\{{(?![^{{}}]*{CHANGES_THE_VALUE})[^{{}}]*\}}"
    rf"|(?<=[0-9}} ])(?![A-Za-z /]{{0,70}}{CHANGES_THE_VALUE})"
    rf"(?:(?:square|sq\.?|cubic) ?)?(?:{UNIT})(?:e?s)?|[€£]|\^\{{\\text\{{(?:st|nd|rd|th)\}}\}})"
    r"(?:\^[23])? ?$"
)

EQUALS = re.compile(r"(?<![<>!:])=|\\in(?![A-Za-z])")
# x =, f(x) =, A_1 =, f^{-1}(x) =, \theta =, |AB| =, a:b =, \text{Area} =, (a, b) =, n \in
NAME = re.compile(
    r"(?![^=]*(?:\bnot\b|\\(?:not|log|l[ng]|exp|sin|cos|tan|cot|sec|csc)(?![a-z])))"
    r"\(?[A-Za-z\\|](?:[A-Za-z\\,'() |:+]|_\w|(?:(?<=text)|(?<=line)|[\^_])\{[^{}]*\})*"
    rf"(?:{EQUALS.pattern}) ?"
)
RELATION = r"(?:[<>]|\\[lg]eq?(?![A-Za-z]) ?)"
# In a solved inequality a letter is alone on one side: x > 5, 0 < x_1 < 5.
UNSOLVED = re.compile(
    rf"(?!(?:.*{RELATION})?\\?[A-Za-z]+(?:_[0-9])?(?:$|,|{RELATION})).*{RELATION}"
)
NUMERAL = re.compile(r"\(?(?P<digits>[0-9][0-9A-F]*)\)?(?:_\{?(?P<base>[0-9]+)\}?)?")


def prepare(predicted, label):
    """Both sides in one spelling, without a name for the answer that they share."""
    return drop_name(respell(predicted), respell(label))


def respell(text):
    text = text.strip().translate(UNICODE_TO_LATEX)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(" .,;:")


def drop_name(predicted, label):
    r"""In "x = 5" and "x \in S" the name goes, if the other side has the same name or none."""
    names = set()
    for side in (predicted, label):
        name = NAME.match(side)
        if name:
            names.add(name[0])
    # A sum is a name in "m + n = 17", but "x + y = 17" as the label is an equation.
    if len(names) != 1 or "+" in label.rpartition("=")[0]:
        return predicted, label
    # The name may come again: "x=1, x=2" becomes "1, 2".
    name = re.compile(rf"(?<![^, ]){re.escape(names.pop())}")
    values = name.sub("", predicted), name.sub("", label)
    # Other equations, as in "x=1, y=2", keep all names.
    if EQUALS.search(" ".join(values)):
        return predicted, label
    return values


def parse_number(text):
    """The exact value of an integer, decimal, fraction or mixed number, or None.

    It comes twice, because a percent sign may be meant or left off: 50% is (50, 1/2), 5 is (5, 5).
    """
    text = FRACTION.sub(r" \1/\2", UNITS.sub("", text))
    number = NUMBER.fullmatch(text.strip())
    if not number:
        return None
    bottom = parse_digits(number["bottom"] or "1")
    if bottom == 0:
        return None
    value = parse_digits(number["whole"] or "0") + parse_digits(number["top"]) / bottom
    if number["sign"] == "-":
        value = -value
    if number["percent"]:
        return value, value / 100
    return value, value


def parse_digits(text) -> Fraction:
    return Fraction(re.sub("[, {}]", "", text))


# ---- the quick rules: each returns True, False, or None where it has nothing to say -------------


def quick_verdict(predicted, label):
    """The verdict of the first rule that has one, in linear time. None: only algebra can tell."""
    if predicted.strip() == label.strip():
        return label.strip() != ""
    if max(len(predicted), len(label)) > MAX_TEXT:
        return False
    predicted, label = prepare(predicted, label)
    verdict = same_number(predicted, label)
    if verdict is not None:
        return verdict
    predicted = unwrap_text(predicted)
    label = unwrap_text(label)
    for rule in (same_text, same_choice, same_in_base, same_word, same_shape, not_algebra):
        verdict = rule(predicted, label)
        if verdict is not None:
            return verdict
    return None


def same_number(predicted, label):
    """Numbers are compared exactly. A percent sign may be left off: 50% is 0.5, and it is 50.

    Where the label is a number, an expression is no answer: the question may hold it already.
    """
    number = parse_number(predicted)
    label_number = parse_number(label)
    if not label_number or POWER_OR_ROOT.fullmatch(UNITS.sub("", predicted)):
        return None
    if not number:
        return False
    return number[0] == label_number[0] or number[1] == label_number[1]


def unwrap_text(text):
    r"""The words of \text{words} alone, and no spaces behind commas."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace(", ", ",").strip()


def same_text(predicted, label):
    """Equal texts are equal, but nothing equals an empty one."""
    if not predicted or not label:
        return False
    if predicted == label:
        return True
    return None


def same_choice(predicted, label):
    """A label of one letter, as in GPQA: C may be given as "C", "(C)" or "C. 12 m"."""
    choice = re.fullmatch(r"\(?([A-J])\)?", label)
    given = re.match(r"(?:[Oo]ption )?\(?([A-Ja-j])(?:[.:)](?!\()|$)", predicted)
    if not choice or not given:
        return None
    return choice[1] == given[1].upper()


def same_in_base(predicted, label):
    """Numerals like 52_8: the prediction may leave the base off, but not name another one."""
    numeral = NUMERAL.fullmatch(label)
    given = NUMERAL.fullmatch(predicted)
    if not numeral or not given or not numeral["base"]:
        return None
    return numeral["digits"] == given["digits"] and given["base"] in (None, numeral["base"])


def same_word(predicted, label):
    """Words are compared without case, but ABCD is not abcd, and up to three letters a product."""
    word = re.fullmatch(r"[A-Za-z' ]{4,}|[Yy]es|[Nn]o|[0-9:]+[AaPp]m", label)
    given = re.fullmatch(r"[0-9:A-Za-z' -]+", predicted)
    if not word or not given:
        return None
    return not label.isupper() and predicted.casefold() == label.casefold()


def same_shape(predicted, label):
    r"""A list has as many members as the label, and where the label is a pair, it has brackets.

    Inequalities, \mathbb{R} and matrices may stand for other forms, so they are left to algebra.
    """
    if re.search(rf"{RELATION}|\\(?:neq?|mathbb|setminus|begin)(?![a-z])", predicted + label):
        return None
    if count_members(predicted) != count_members(label):
        return False
    if re.fullmatch(r"\(.*,.*\)", label) and not re.match(r"[^(\[]*[(\[].*,", predicted):
        return False
    return None


def count_members(text):
    r"""How many values a list has, where \pm gives two."""
    return 1 + text.count(",") + text.count(r"\pm")


def not_algebra(predicted, label):
    """False for what algebra would get wrong; it is the last rule."""
    # An equation is not a value.
    if bool(EQUALS.search(predicted)) != bool(EQUALS.search(label)):
        return False
    # The question may hold an inequality that is to be solved.
    if UNSOLVED.match(predicted) and not UNSOLVED.match(label):
        return False
    # The grammar of math-verify drops primes and the base of a numeral. To it, an angle or a
    # triangle ABC is a product.
    if predicted.count("'") != label.count("'"):
        return False
    if re.search(r"[0-9]_|\\(?:tri)?angle", predicted + label):
        return False
    return None


# ---- algebra: only in a process that may die ---------------------------------------------------


def symbolic_verdict(predicted, label):
    """Equality by math-verify with the label as gold. It may raise, hang or eat memory.

    `verify` is not asked the other way round, where it takes 2, 1 for (1, 2). What that would
    find is found by `prepare` (x = 5) and by allow_set_relation_comp (x > 5).
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    symbols = ConversionConfig(lowercase_symbols=False)
    expressions = []
    for text in prepare(predicted, label):
        if re.search("[0-9]", text):
            text = UNITS.sub("", text)
        # (3,125) is a pair.
        text = text.replace(",", ", ")
        # An i of its own is the imaginary unit.
        text = re.sub(r"(?<![A-Za-z\\])[iI](?![A-Za-z])", "{I}", text)
        text = normalize_latex(text, spelling)
        expression = latex2sympy(
            text, is_real=True, normalization_config=None, conversion_config=symbols
        )
        # Numbers are compared exactly only if they are worked out before.
        expressions.append(expression.doit())
    answer, gold = expressions
    # With 60 digits instead of the default of 15, numbers below 1e-15 are not all 0.
    return verify(
        gold, answer, numeric_precision=60, allow_set_relation_comp=True, timeout_seconds=None
    )


class Worker:
    """A worker process as its parent sees it. It starts at the first question, and anew if lost."""

    def __init__(self, cpu_seconds):
        self.cpu_seconds = cpu_seconds
        self.process = None

    def ask(self, predicted, label, wall_seconds):
        """The answer, "equal" or "different", or else how the process was lost.

        That is "cpu_timeouts", "wall_timeouts" or "crashes". Raises ChildProcessError if no
        process can be started.
        """
        if self.process is None or self.process.poll() is not None:
            self.start()
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            # JSON in ASCII lets unpaired surrogates pass.
            self.process.stdin.write(json.dumps([predicted, label]).encode() + b"\n")
            if not wait([self.process.stdout], wall_seconds):
                self.kill()
                return "wall_timeouts"
            reply = self.process.stdout.read(1)
        if reply == b"1":
            return "equal"
        if reply == b"0":
            return "different"
        self.kill()
        if self.process.returncode == -signal.SIGPROF:
            return "cpu_timeouts"
        return "crashes"

    def start(self):
        """Waits until the process is ready, so that its imports count against no check."""
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(self.cpu_seconds)]
        # The order of terms in sympy follows the hashes of texts.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self.process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, env=environment)
        if self.process.stdout.read(1) != b"r":
            raise ChildProcessError(f"{' '.join(command)} ended before its first check")

    def kill(self):
        if self.process is not None:
            with self.process:  # closes its pipes and waits for it
                self.process.kill()


def serve(cpu_seconds):
    """The worker process: reads lines of JSON, [predicted, label], and writes one byte for each.

    SIGPROF keeps its default action, so the kernel ends a check that runs too long, even in C.
    """
    limit_process()
    import sympy

    # These checks import what sympy imports late, some of it by eval.
    pairs = (
        ("ab+2a", "a(b+2)"),
        ("x>5", "(5, \\infty)"),
        ("2x=4y", "x-2y=0"),
        ("\\cos x", "\\sin x"),
    )
    for predicted, label in pairs:
        symbolic_verdict(predicted, label)
    close_sympy()
    os.write(1, b"r")  # ready
    for line in sys.stdin.buffer:
        # A verdict must not depend on the checks before it.
        sympy.core.cache.clear_cache()
        sympy.core.random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            is_equal = symbolic_verdict(*json.loads(line))
        except Exception:
            is_equal = False  # not in the grammar, or too deep
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, b"1" if is_equal else b"0")


def limit_process():
    """What the process may not do: outlive its parent, obey the terminal, take all memory."""
    import ctypes
    import logging
    import resource

    # PR_SET_PDEATHSIG: the process ends with the thread that started it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # A signal to the whole group is for the trainer; a worker that died of it would grade 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A normal check needs 80 MB.
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # bytes
    # math-verify warns that its own time-outs, by SIGALRM, are off.
    logging.disable()


def close_sympy():
    """Closes the two places where sympy turns text into code, after its own imports used them."""
    import sympy.parsing.sympy_parser

    # Number tokens go through sympify, which evaluates. Here they are read, and exactly.
    number = re.compile(r"[0-9.]+(?:[eE][+-]?[0-9]{1,3})?")

    def read_number(text, **options):
        return sympy.Rational(number.fullmatch(text)[0])

    sympy.parsing.sympy_parser.parse_expr = read_number
    # Names in sums go through lambdify, which executes. Without exec an infinite sum is unequal.
    sys.modules["sympy.utilities.lambdify"].exec = None


if __name__ == "__main__":
    serve(float(sys.argv[2]))  # after --worker
