r"""The task: problems (load, template) and rewards (extract an answer, compare it with the label, text metrics).

Swap this file to change the task: it sees only text and imports none of the others. Alone: `python -c "import reward;
print(reward.is_equiv('1/2', '0.5'))"`. As Open-Reasoner-Zero (ORZ: playground/orz_7b_ppo.py), except where that errs:
- ORZ allows 1 s of wall time, queue included, in threads nobody can kill: a busy machine loses right answers. Here the
  kernel ends a check by the CPU time of that check alone, so a reward does not depend on load.
- ORZ compares floats. Here numbers are exact: a decimal is right only where it equals the label; 0.333333 is not 1/3.
- Of math-verify only the grammar and `verify` are used. Its `parse` takes m, h, c and ab for units (2m = 2), lower-
  cases symbols (R^2 - r^2 = 0) and gives plain expressions to sympy's parse_expr, which evaluates: never model text.
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
from concurrent import futures
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import wait
from subprocess import PIPE, Popen

# Filled by str.replace: \boxed{} breaks str.format. "orz" is a protocol constant: models trained with it need all of it
TEMPLATES: dict[str, str] = {
    "orz": "{bos}A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
    "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. The "
    "reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: You must put "
    "your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will be "
    "extracted automatically by the \\boxed{} tag.\nThis is the problem:\n{question}\n\nAssistant: <think>",
    "demo": "{question}<think>",
    "plain": "{question}",
}
MAX_TEXT = 2_500  # characters: a longer answer equals only itself; a shorter one fits, as JSON, into a pipe's 64 KB


class RewardError(ValueError):
    """Bad input by the user, in one line: what, where, what to do."""


@dataclass(frozen=True)
class Problem:
    index: int  # position in its file
    question: str
    label: object  # the answer as text; another task may put its tests here
    prompt: str  # the template with the question in it


def load_problems(path: str, template: str, bos="", columns=("question", "answer"), split="train") -> list[Problem]:
    """Problems of a JSON or JSONL file (forms of ORZ's training and evaluation, GSM8K, or `columns`) or of a dataset.

    template: a key of TEMPLATES or a text with {question}. A path that is no file: a dataset's folder or "name:config".
    Raises RewardError, which names the file, the line or item (from 1) and what is missing or wrong there.
    """
    template = TEMPLATES.get(template, template).replace("{bos}", bos)
    if "{question}" not in template:
        raise RewardError(f"template {template!r}: give one of {', '.join(TEMPLATES)}, or a text with {{question}}")
    problems, place, lines = [], path, path.endswith(".jsonl")
    try:
        for number, row in enumerate(read_rows(path, split), start=1):
            place = f"{path}: {'line' if lines else 'item'} {number}"
            if lines and not row.strip():
                continue
            record = json.loads(row) if lines else row
            if isinstance(record, list):  # ORZ, training
                question, label = record[0]["value"], record[1]["ground_truth"]["value"]
            elif "final_answer" in record:  # ORZ, evaluation
                question, label = record["prompt"][0]["value"], record["final_answer"]
            else:
                question, label = record[columns[0]], record[columns[1]]
            answer = str(label).rpartition("####")[2].strip()  # GSM8K puts the worked solution first
            if not isinstance(question, str) or not question.encode().strip():  # encode: no lone surrogates
                raise ValueError(f"its question is no text: {question!r:.99}")
            if not isinstance(label, (str, int, float)) or isinstance(label, bool) or not answer or "\n" in answer:
                raise ValueError(f"lacks an answer of one line (GSM8K: after '#### '): {label!r:.99}")
            problems.append(Problem(len(problems), question, answer, template.replace("{question}", question)))
    except Exception as error:  # files, JSON, forms; the datasets library alone has a dozen kinds for "not found"
        kinds = {KeyError: f"lacks {error} of its form", IndexError: "has an empty list where its form has items",
                 TypeError: f"is not of its form: {error}"}
        reason = kinds.get(type(error), f"{type(error).__name__}: {error}")
        hint = f"give a list of ORZ's or GSM8K's items, columns {columns}, or a dataset with split {split!r}"
        raise RewardError(f"{place}: {' '.join(reason.split())[:300]}; {hint}") from None
    if not problems:
        raise RewardError(f"{path}: holds no problems; give a file or split with at least one")
    return problems


def read_rows(path, split):
    """The lines of a .jsonl file, the items of any other file's JSON list, or the rows of a dataset."""
    if path.endswith((".json", ".jsonl")) or os.path.isfile(path):
        with open(path, encoding="utf-8-sig", newline="\n") as file:  # a text may hold other ends of line
            return file.readlines() if path.endswith(".jsonl") else list(json.load(file))
    import datasets  # slow to import, and only needed here
    saved = any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))
    rows = datasets.load_from_disk(path) if saved else datasets.load_dataset(*path.split(":", 1))
    return rows[split] if isinstance(rows, dict) else rows


def extract_answer(text: str) -> str | None:
    r"""The content of the last balanced \boxed{} between the last </answer> and the last <answer> before it, or None.

    As in ORZ a box outside is no answer, nor one in an <answer> that the limit or another stop string left unclosed.
    """
    end = max(text.rfind("</answer>"), 0)
    block = text[text.rfind("<answer>", 0, end) : end] if "<answer>" in text[:end] else ""
    best, stack = (-1, -1), []  # one pass: 100,000 nested braces take 0.1 s
    for token in re.finditer(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", block, re.DOTALL):
        if token[0] == "}" and stack:
            best = max(best, (stack.pop(), token.start()))
        elif token[0] in ("{", "\\boxed{"):  # an escaped brace is one token with its backslash: no brace
            stack.append(-1 if token[0] == "{" else token.end())
    return block[best[0] : best[1]] if best[0] >= 0 else None


# Spellings of the same thing, brought to one in this order. No pattern nests repeats: linear in the text.
LATEX = ("-", "-", r"\times ", r"\cdot ", r"\pi ", r"\infty ", r"\le ", r"\ge ", r"^\circ ", r"\cup ", "^2", "^3")
UNICODE = str.maketrans(dict(zip("−–×·π∞≤≥°∪²³", LATEX)))
REWRITES = (
    (r"[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", ""),  # zero-width and right-to-left marks
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|\\!\s*|\\?\$|\\displaystyle(?![A-Za-z])", ""),
    (r"^\\[\[(]((?:(?!\\[()\[\]]).)*)\\[\])]$", r"\1"),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+", " "),
    (r"\\(?:mathrm|mathbf|mathit|mbox|text(?:bf|it|rm|normal)) ?(?=\{)", r"\\text"),
    (r"\^ ?(?:\{ ?\\(?:circ|degree) ?\}|\\circ)(?![A-Za-z])|\\degree(?![A-Za-z])", ""),
    (r"\\%| ?\\text\{ ?(?:percent|\\?%) ?\}| ?(?<![A-Za-z])percent(?![A-Za-z])", "%"),
    (r",? ?\\text\{ ?(?:or|and) ?\} ?|,? (?:or|and) ", ", "),
    (r"√ ?([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(frac|sqrt) ?([0-9A-Za-z])", r"\\\1{\2}"),
    (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}"),
    (r"([\^_]) ?\{ ?([0-9A-Za-z]) ?\}", r"\1\2"),
    (r"(?<![0-9A-Za-z,]) +| +(?![0-9A-Za-z])", ""),  # "3 1/2" and "1, 234" keep theirs: they are not 31/2 and 1234
)
DIGITS = r"(?:(?:[1-9][0-9]{0,2}(?:(?:[, ]|\{,\})[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
NUMBER = re.compile(rf"[£€]?([+-]?) ?[£€]?(?:([0-9]+) (?=[0-9.]+/))?([+-]?{DIGITS})(?:/([+-]?{DIGITS}))?(%?)")
UNITS = re.compile(  # behind a number the field leaves off a \text{} that does not change the value, and common units
    r"(?: ?(?<=[0-9A-Za-z})% ])\\text\{(?![^{}]*(?:[0-9]|\b(?:is|if|when|or|for|not|than|mod|base|half|more|less|least|"
    r"most|dozen|hundred|thousand|[mbt]r?illion)\b))[^{}]*\}|(?<=[0-9} ])(?:(?:square|sq\.?|cubic) )?(?:[mck]m|in|inch|"
    r"f(?:oo|ee)?t|yard|mile|[a-z]*met(?:er|re)|[mk]g|(?:kilo)?gram|lb|pound|ml|lit(?:er|re)|sec|second|min|minute|hr|"
    r"hour|day|week|month|year|deg|degree|mph|dollar|cent|unit|point|way|people)(?:e?s)?)(?:\^[23])? ?$"
)
EQUALS = re.compile(r"(?<![<>!:])=|\\in(?![A-Za-z])")
# x =, f(x) =, A_1 =, f^{-1}(x) =, \theta =, \text{Area} =, (a, b) =, n \in
NAME = re.compile(rf"\(?[A-Za-z\\](?:[A-Za-z\\,'() ]|_\w|(?:(?<=text)|[\^_])\{{[^{{}}]*\}})*(?:{EQUALS.pattern}) ?")


def prepare(predicted, label):
    r"""Both sides in one spelling; "x = 5" and "x \in S" lose a name that the other side shares or has none."""
    pair = []
    for text in (predicted, label):
        text = text.strip().translate(UNICODE)
        for pattern, new in REWRITES:
            text = re.sub(pattern, new, text)
        pair.append(text.strip().rstrip(" .,;:"))
    names = {name[0] for side in pair if (name := NAME.match(side))}
    if len(names) == 1 and all(NAME.match(side) or not EQUALS.search(side) for side in pair):
        pair = [re.sub(rf"(?<![^, ]){re.escape(*names)}", "", side) for side in pair]  # x=1, x=2 becomes 1, 2
    return pair


def parse_number(text):
    """(exact value or None, has a percent sign) of an integer, decimal, fraction or mixed number."""
    text = re.sub(rf"\\frac\{{([+-]?{DIGITS})\}}\{{([+-]?{DIGITS})\}}", r" \1/\2", UNITS.sub("", text))
    found = NUMBER.fullmatch(text.strip().replace("- ", "-"))
    sign, whole, top, bottom, percent = found.groups() if found else ("", "0", "0", "0", "")
    whole, top, bottom = (Fraction(re.sub("[, {}]", "", part)) for part in (whole or "0", top, bottom or "1"))
    value = whole + top / bottom if bottom else None
    return -value if value and sign == "-" else value, bool(percent)


def quick_verdict(predicted: str, label: str) -> bool | None:
    """Equality by text, number, choice or word: in process, in linear time. None: only sympy can tell."""
    if predicted.strip() == label.strip() or max(len(predicted), len(label)) > MAX_TEXT:
        return predicted.strip() == label.strip() != ""
    predicted, label = prepare(predicted, label)
    (value, percent), (label_value, label_percent) = parse_number(predicted), parse_number(label)
    if value is not None and label_value is not None:  # the percent sign may be left off: 50% is 0.5, and is 50
        return value == label_value or value * (100 if label_percent else 1) == label_value * (100 if percent else 1)
    predicted, label = (re.sub(r"\\text\{([^{}]*)\}", r"\1", x).replace(", ", ",").strip() for x in (predicted, label))
    if predicted == label or not predicted or not label:
        return predicted == label != ""
    choice, given = re.fullmatch(r"\(?([A-J])\)?", label), re.match(r"\(?([A-Ja-j])(?:[.:)](?!\()|$)", predicted)
    if choice and given:  # GPQA: "C", "(C)", "C. 12 m"
        return choice[1] == given[1].upper()
    based = [re.fullmatch(r"\(?([0-9][0-9A-F]*)\)?(?:_\{?([0-9]+)\}?)?", side) for side in (predicted, label)]
    if all(based) and (based[0][2] or based[1][2]):  # 52_8: the base may be left off, but not be another
        return based[0][1] == based[1][1] and len({based[0][2], based[1][2]} - {None}) == 1
    if re.fullmatch(r"[A-Za-z' -]{4,}|[Yy]es|[Nn]o", label) and re.fullmatch(r"[A-Za-z' -]+", predicted):
        return predicted.casefold() == label.casefold()
    # An equation is not a value; and sympy's grammar drops the base of a numeral
    hopeless = bool(EQUALS.search(predicted)) != bool(EQUALS.search(label)) or re.search("[0-9]_", predicted + label)
    return False if hopeless else None


def symbolic_verdict(predicted, label):
    """Equality by math-verify, label as gold; for grading processes only: it may raise, hang or eat memory.

    Not the other way round, which takes 2, 1 for (1, 2): `prepare` (x = 5) and allow_set_relation_comp (x > 5) do that.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    case, sides = ConversionConfig(lowercase_symbols=False), []
    for text in prepare(predicted, label):
        text = UNITS.sub("", text) if re.search("[0-9]", text) else text
        text = text.replace(",", "" if parse_number(text)[0] is not None else ", ")  # (3,125) is a pair, 3,125 is not
        text = normalize_latex(re.sub(r"(?<![A-Za-z\\])[iI](?![A-Za-z])", "{I}", text), spelling)  # imaginary
        sides.append(latex2sympy(text, is_real=True, normalization_config=None, conversion_config=case))
    # 60 digits: at the default of 15 anything below 1e-15 is 0
    return verify(sides[1], sides[0], numeric_precision=60, allow_set_relation_comp=True, timeout_seconds=None)


def is_equiv(predicted: str, label: str) -> bool:
    """Is the predicted answer right? Safe for any text: what only sympy can tell is asked of a process that may die."""
    grader = shared_grader(os.getpid(), threading.get_ident())  # a forked child must not share its parent's pipes
    grader.compare("is_equiv", predicted, label)
    return bool(grader.results()["is_equiv"])


class Grader(contextlib.AbstractContextManager):
    """Grades samples as they end: cheap verdicts at once, symbolic ones in `workers` processes, started by need.

    A check is ended, and 0, after cpu_seconds of its own CPU time, or after wall_seconds in case it hangs idle; lost
    processes are replaced. Equal pairs share a check until results(). counts never go back to 0.
    """

    def __init__(self, workers: int = 1, cpu_seconds: float = 5.0, wall_seconds: float = 120.0):
        self.cpu_seconds, self.wall_seconds = cpu_seconds, wall_seconds
        self.counts = dict.fromkeys(("checks", "symbolic", "cpu_timeouts", "wall_timeouts", "crashes"), 0)
        self.pairs, self.verdicts = {}, {}  # key -> pair; pair -> bool, or the future of one
        self.threads = futures.ThreadPoolExecutor(workers)  # each only feeds its own process and waits for it
        self.own, self.lock, self.processes = threading.local(), threading.Lock(), set()

    def submit(self, key, text: str, finish_reason: str, label) -> None:
        """Takes a finished sample and returns at once. Reward: 1.0 if it stopped by itself with the right answer."""
        answer = extract_answer(text) if finish_reason == "stop" else None
        self.compare(key, answer or "", str(label))

    def compare(self, key, predicted, label):
        self.counts["checks"] += 1
        self.pairs[key] = pair = (predicted, label)
        if pair not in self.verdicts:
            self.verdicts[pair] = quick_verdict(predicted, label)
            if self.verdicts[pair] is None:
                self.counts["symbolic"] += 1
                self.verdicts[pair] = self.threads.submit(self.check, pair)

    def pending(self, seconds: float) -> int:
        """How many verdicts are still to come after at most so long."""
        checks = [verdict for verdict in self.verdicts.values() if not isinstance(verdict, bool)]
        return len(futures.wait(checks, seconds).not_done)

    def results(self) -> dict:
        """{key: reward} of all that was submitted since the last call; waits for what is pending."""
        verdicts = {pair: v if isinstance(v, bool) else v.result() for pair, v in self.verdicts.items()}
        rewards = {key: float(verdicts[pair]) for key, pair in self.pairs.items()}
        self.pairs, self.verdicts = {}, {}
        return rewards

    def check(self, pair):
        """In a thread: the verdict of its process; False if that is lost."""
        process, reply = getattr(self.own, "process", None), b""
        if process is None or process.poll() is not None:
            command = [sys.executable, os.path.abspath(__file__), "--worker", str(self.cpu_seconds)]
            environment = {**os.environ, "PYTHONHASHSEED": "0"}  # sympy's order of terms follows the hashes of texts
            process = self.own.process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, env=environment)
            self.processes.add(process)
            if process.stdout.read(1) != b"r":  # ready: its imports count against no check
                raise RewardError(f"{' '.join(command)} ended before its first check; run.log has its error")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(pair).encode() + b"\n")  # ASCII: unpaired surrogates pass
            reply = process.stdout.read(1) if wait([process.stdout], self.wall_seconds) else None
        if not reply:
            with process:  # closes its pipes and waits for it
                process.kill()
            self.processes.discard(process)
            reason = "cpu_timeouts" if process.returncode == -signal.SIGPROF else "crashes"
            with self.lock:
                self.counts["wall_timeouts" if reply is None else reason] += 1
        return reply == b"1"

    def close(self, *error) -> None:
        """Ends the processes and drops what is pending. They also end with their parent."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes):
            with process:
                process.kill()

    __exit__ = close


def serve(cpu_seconds):
    """A grading process. SIGPROF keeps its default action: the kernel ends a check that runs too long, even in C."""
    import ctypes
    import logging
    import resource

    import sympy.parsing.sympy_parser

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the thread that started it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group, they are for the trainer: a dead worker grades 0
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # bytes; a normal check needs 80 MB
    logging.disable()  # math-verify warns that its own time-outs (SIGALRM) are off
    for pair in (("ab+2a", "a(b+2)"), ("x>5", "(5, \\infty)"), ("2x=4y", "x-2y=0"), ("\\cos x", "\\sin x")):
        symbolic_verdict(*pair)  # imports what sympy imports late, some of it by eval
    # In sympy text becomes code twice: number tokens by sympify, names by lambdify in sums. Read numbers here, exactly,
    number = re.compile(r"[0-9.]+(?:[eE][+-]?[0-9]{1,3})?")
    sympy.parsing.sympy_parser.parse_expr = lambda text, **_: sympy.Rational(number.fullmatch(text)[0])
    sys.modules["sympy.utilities.lambdify"].exec = None  # and close the other: infinite sums stay unequal
    os.write(1, b"r")  # ready; then one byte a line: the verdict on [predicted, label]
    for line in sys.stdin.buffer:
        sympy.core.cache.clear_cache()  # a verdict must not depend on the checks before it
        sympy.core.random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            verdict = symbolic_verdict(*json.loads(line))
        except Exception:
            verdict = False  # not in the grammar, or too deep for it
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, b"1" if verdict else b"0")


def text_metrics(text: str) -> dict[str, float]:
    """repetition: share of word 4-grams seen before (ORZ: suffix arrays, slow); reflection: words of second thought."""
    words, lowered = text.split(), text.lower()
    grams = list(zip(*(words[start:] for start in range(4))))
    reflection = sum(map(lowered.count, ("wait,", "recheck", "retry", "alternatively,", "however,")))
    return {"repetition": 1 - len(set(grams)) / len(grams) if grams else 0.0, "reflection": float(reflection)}


shared_grader = functools.cache(lambda pid, thread: Grader())
if __name__ == "__main__" and "--worker" in sys.argv:
    serve(float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
