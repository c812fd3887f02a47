r"""The task: problems and their prompts, answers and their rewards. Another task replaces it.

This file sees only text. A comparison asks whether an answer equals the label, which is the right
answer. The file deviates from Open-Reasoner-Zero (ORZ: playground/orz_7b_ppo.py):
- ORZ allows a comparison 1 s of wall time, which includes the wait in a queue. On a busy machine
  the wait takes longer, and right answers get no reward. Here a limit holds for the CPU time of the
  comparison alone. So the load of the machine changes no reward, unless a comparison takes 120 s
  of wall time.
- ORZ compares floats. Here numbers are exact: 0.333333 is not 1/3.
- ORZ takes the last \boxed{} alone. Here \boxed {} and \fbox{} are boxes, too, and boxes that only
  commas, "and" or "or" separate are a list.
- ORZ calls the parser of math-verify, which misreads symbols and evaluates text as code. Here only
  the grammar and the comparison of math-verify are used (nanoorz/algebra.py).

`python reward.py FILE` shows what is read of a file. To use reward.py elsewhere, copy equal.py,
algebra.py, ranks.py and records.py of nanoorz/, too. Then try
`python -c "import reward; print(reward.is_equiv('1/2', '0.5'))"`.
"""

import math
import os
import re
import signal
import sys
from collections import Counter
from concurrent import futures
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

from nanoorz.equal import Worker, parse_number, quick_verdict
from nanoorz.ranks import UserError, one_line
from nanoorz.records import (
    NO_TEXT,
    SOLUTIONS,
    Unusable,
    find_parts,
    list_turns,
    parse_question,
    parse_text,
    read_file,
    split_path,
)

# ---- problems ------------------------------------------------------------------------------------

# str.replace fills in {bos} and {question}. str.format would take the braces of \boxed{} for a
# field. Models that were trained with "orz" need exactly this text.
TEMPLATES = {
    "orz": "{bos}A conversation between User and Assistant. The User asks a question, and the "
    "Assistant solves it. The Assistant first thinks about the reasoning process in the mind and "
    "then provides the User with the answer. The reasoning process is enclosed within <think> "
    "</think> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>. User: You must put your "
    "answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
    "answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
    "{question}\n\nAssistant: <think>",
    "demo": "{question}<think>",
    "plain": "{question}",
    # train.py puts the question into the chat template of the tokenizer.
    "chat": "{question}",
}


@dataclass(frozen=True)
class Problem:
    index: int  # position among all problems of the file. train.py counts over all files.
    question: str
    # The right answer as text. Another task may put its tests here.
    label: object
    prompt: str  # the template with the question in it; for --template chat the question
    prompt_ids: list[int] | None = None  # train.py fills it
    system: str = ""  # the record's own system turn, for --template chat


def load_problems(path, template, bos="", columns=None, split="train", templates=TEMPLATES):
    """The problems of a JSON, JSONL or CSV file (also .gz), of a Parquet file, or of a dataset.

    A path that is no file is a dataset's folder or "name:config". columns: the paths of question
    and label, or None (records.py finds them). `template` is a key of `templates` or a text with
    {question}. What cannot be used is left out, and a line on stderr says how many and why. Raises
    UserError, also if more records are left out than read.
    """
    reading = read_file(path, partial(parse_record, columns=columns), split)
    where = f"{path}?columns={','.join(columns)}" if columns else path
    advice = f"`python reward.py '{where}'` shows more; {NAME_COLUMNS}"
    sentences = describe_sentences(reading)
    return make_problems(path, reading, template, templates, bos, advice, sentences)


def make_problems(path, reading, template, templates, bos, advice, more_warnings=()):
    """The Problems of a Reading. Other tasks call it with their own templates.

    advice: what to do if too little is read. more_warnings: sentences for stderr, besides those
    about records that are left out. Raises UserError.
    """
    prompt_template = templates.get(template, template).replace("{bos}", bos)
    if "{question}" not in prompt_template:
        raise UserError(
            f"template {template!r} is unknown and lacks {{question}}; choose "
            f"{', '.join(templates)}, or write a text with {{question}}"
        )
    if reading.is_refused():
        why = "; ".join(reading.describe()) or "holds no problems"
        raise UserError(f"{path}: {why}; {advice}")
    problems = []
    for record in reading.records.values():
        prompt = prompt_template.replace("{question}", record["question"])
        system = record.get("system", "")
        problem = Problem(len(problems), record["question"], record["label"], prompt, None, system)
        problems.append(problem)
    warnings = [*reading.describe(), *more_warnings]
    with_system = sum(bool(problem.system) for problem in problems)
    if with_system and template != "chat":
        name = f"--template {one_line(template):.20}"
        warnings.append(f"{with_system} problems have a system turn, and {name} leaves it out")
    # The file may also be read without a launcher.
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"warning: {path}: {warning}", file=sys.stderr)
    return problems


NAME_COLUMNS = "FILE?columns=QUESTION,LABEL names two columns, and x.y names y inside of x"
# What files have where they have no answer. The last one is an error of a spreadsheet.
NO_ANSWER = re.compile(
    r"proof|not ?found|no answer|not available|see figure|nan|none|null|n/a|<na>|-?inf|tbd|\?|\[\]"
    r"|#[a-z0/]+[!?a]",
    re.IGNORECASE,
)


BLANKS = " \n\xa0\u200b\ufeff"


def parse_record(record, columns):
    """The question and the label of a record, and where they stand. Raises Unusable."""
    if columns and len(columns) != 2:
        raise UserError("name two columns, as in FILE?columns=prompt,solution")
    paths, (question, label) = find_parts(record, columns)
    question, system, has_several = parse_question(question)
    # In a column that the user names, a text without a mark is the label.
    label = parse_label(label, columns is None and paths[1] in SOLUTIONS)
    found = {"question": question, "label": label, "system": system}
    return found | {"paths": paths, "has_several_turns": has_several}


def parse_label(value, is_solution=False):
    r"""The label of a record, as one line of text. Raises Unusable.

    MATH puts the label into the last \boxed{} of the worked solution. GSM8K puts it behind the
    solution: ... #### 18. is_solution: the value must have one of these two marks.
    """
    text = to_text(value)
    label = last_box(text)
    # Some solutions of MATH have \fbox.
    last_start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last_start >= 0 and not (label and find_boxes(text)[-1][0] == last_start):
        raise Unusable(r"a \boxed without a closed {}")
    if label is None:
        solution, has_hashes, label = text.rpartition("####")
        if "####" in solution:
            raise Unusable("#### in several places")
        if is_solution and not has_hashes:
            raise Unusable(r"a solution without \boxed{} and without ####")
    # A \r at the start stays, and is refused below, because it may come from \rho.
    label = label.rstrip(BLANKS + "\r").lstrip(BLANKS)
    if not label or NO_ANSWER.fullmatch(label):
        raise Unusable(f"the label {label!r}")
    if "\n" in label:
        raise Unusable("a label of several lines")
    if NO_TEXT.search(label) or "\t" in label or "\r" in label:
        raise Unusable("a character in the label that is no text")
    return label


def to_text(value):
    """The text of a label or of a solution. Raises Unusable."""
    value = parse_text(value)
    if isinstance(value, str) and re.match(r"""\s*\[\s*["']""", value):
        raise Unusable("a list that cannot be read as label")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        # The last turn of a conversation has the solution.
        role, value = list_turns(value)[-1]
        if role not in ("assistant", "gpt", "model"):
            raise Unusable("a conversation that does not end with a solution")
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise Unusable(f"the label {value}")
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Unusable(f"a label of the type {type(value).__name__}")
    # All digits, as people write a number: 10000000000000000000000 and not 1e+22.
    return f"{Decimal(str(value)):f}"


def describe_sentences(reading) -> list[str]:
    """A sentence about labels that are sentences, or nothing."""
    found = [number for number, record in reading.records.items() if is_sentence(record["label"])]
    if not found:
        return []
    place = reading.place_of_first(found)
    return [f"{len(found)} labels are sentences, which few answers will equal ({place})"]


def is_sentence(label):
    words = re.findall(r"(?<!\\)\b[A-Za-z]{2,}", label)  # \frac is no word
    other_letters = re.findall(r"[^\W\d_A-Za-z]", label)
    return len(words) >= 4 or len(other_letters) >= 8 or "answer" in label.lower()


# ---- answers -------------------------------------------------------------------------------------


def extract_answer(text):
    r"""ORZ's form: the content of the last box (last_box) in the last closed answer block.

    The block begins at the last <answer> before the last </answer>. As in ORZ, a box outside of the
    block is no answer. Without </answer> there is no answer.
    """
    head, _, _ = text.rpartition("</answer>")
    _, opened, block = head.rpartition("<answer>")
    if not opened:
        return None
    return last_box(block)


BRACES = re.compile(
    # The start of a box: \boxed{    \boxed {    \fbox{
    r"\\(?:boxed|fbox) *\{"
    # A backslash with the character behind it, such as \{, which is no brace. In \\boxed{ the
    # second backslash belongs to the box, so the first one is not taken together with it.
    r"|\\(?!\\(?:boxed|fbox) *\{)."
    # A brace.
    r"|[{}]",
    re.DOTALL,
)


def last_box(text):
    r"""The form of most instruct models: the content of the last balanced \boxed{} anywhere.

    The last box is the one that begins last. So of nested boxes the inner one is the answer. Boxes
    that only commas, "and" or "or" separate are a list: \boxed{3}, \boxed{5} is the answer 3, 5.
    """
    boxes = find_boxes(text)
    if not boxes:
        return None
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[::-1]):
        if not BETWEEN_BOXES.fullmatch(text[end:start]):
            break
        contents.append(content)
    # One answer in several spellings is one answer: \boxed{72}, or \boxed{72\text{ clips}}
    others = set(contents[1:])
    if len(others) < 8 and all(quick_verdict(other, contents[0]) for other in others):
        return contents[0]
    return ", ".join(reversed(contents))


def find_boxes(text) -> list[tuple[int, int, str]]:
    """(start, end, content) of the boxes that are closed, without those around another box."""
    boxes = []
    # A stack with an entry for each open brace: the match that starts a box, or None for a brace
    # that belongs to no box.
    opened = []
    for token in BRACES.finditer(text):
        if len(token[0]) > 2:
            opened.append(token)
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            # An outer box closes after its inner boxes, and has started before them.
            if start and not (boxes and boxes[-1][0] > start.start()):
                boxes.append((start.start(), token.end(), text[start.end() : token.start()]))
    return boxes


# What may separate the boxes of a list: \boxed{3}, \boxed{5}    x=\boxed{3} and $y=\boxed{5}$
BETWEEN_BOXES = re.compile(
    # A comma, a semicolon, and    or    \text{ and }
    r"[\s$]*(?:,|;|(?:,\s*)?(?:\\text\{\s*)?(?:and|or)\b(?:\s*\})?)[\s$]*"
    # The name of the next value: x_1 =
    r"(?:[A-Za-z](?:_\w)?\s*=\s*)?"
)


def last_number(text):
    """The last decimal number in the text, with its sign and with commas between its thousands.

    A minus after a digit, a letter or a bracket is an operation and no sign. The last number of 1/2
    is 2.
    """
    # -    −$    but not the minus of 9-7 or x-7. A minus may be a hyphen, a minus sign or a dash.
    minus = r"(?:(?<![\w)\]}])[-−–]\$?)?"
    # 18    1,234.50    .25
    numbers = re.findall(minus + r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)", text)
    if numbers:
        return numbers[-1]


def after_hashes(text):
    """GSM8K's form: the text behind the last #### in the same line."""
    _, found, rest = text.rpartition("####")
    if found:
        line = rest.partition("\n")[0]
        # A stop text that is a special token, such as <|im_end|>, may stand at the end.
        return re.sub(r"<[^<>\s]+>$", "", line).strip("#* ")


# {value of --answer_form: function from a response to its answer}. The results None and "" mean
# that the response has no answer.
ANSWER_FORMS = {
    "orz": extract_answer,
    "boxed_anywhere": last_box,
    "last_number": last_number,
    "hashes": after_hashes,
}


# ---- rewards -------------------------------------------------------------------------------------


def is_equiv(answer, label):
    """Is the answer right? A text that hangs or crashes its comparison costs one worker process.

    Raises UserError if no worker process can be started. The start takes 2 s, so use one Grader for
    many answers.
    """
    with Grader() as grader:
        grader.compare("is_equiv", answer, label)
        return bool(grader.results()["is_equiv"])


class Grader:
    """Grades samples as they end. `results` then gives all rewards.

        with Grader(workers=2, answer_form="orz") as grader:
            grader.submit("my key", text, "stop", label)  # returns the answer, or None
            grader.pending(seconds=0.5)  # returns how many comparisons still run
            grader.results()  # waits for all comparisons, and returns {"my key": 1.0}

    A quick rule decides at once whether an answer is right, or a worker process decides later. The
    comparison of a worker ends without a verdict after `cpu_seconds` of its own CPU time, after
    `wall_seconds`, or if its process crashes. Then the reward is 0.

    A worker process starts when the first comparison needs it. If a process crashes, another one
    starts. Samples with the same answer and label share a comparison until `results` returns. If a
    comparison used up its CPU time, the same answer and label get 0 at once in all later calls.

    `counts` says how many comparisons of workers ended in each way since the start: "equal",
    "different", "cpu_timeouts", "wall_timeouts" or "crashes". `results` raises UserError if no
    worker process can be started.
    """

    def __init__(self, workers=1, answer_form="orz", cpu_seconds=5.0, wall_seconds=120.0):
        self.find_answer = ANSWER_FORMS[answer_form]
        self.counts = Counter()
        # A pair is (answer, label).
        self.pairs = {}  # {key: its pair}
        self.verdicts = {}  # {pair: is it equal?}
        self.running = {}  # {pair: Future of one of the five ways to end}
        self.too_slow = set()  # pairs whose comparisons used up their CPU time
        self.workers = [Worker(cpu_seconds, wall_seconds) for _ in range(workers)]
        self.idle_workers = self.workers.copy()
        # There are as many threads as workers. A thread waits for its worker.
        self.threads = futures.ThreadPoolExecutor(workers)

    def submit(self, key, text, finish_reason, label):
        """Takes a finished sample. Returns its answer at once, or None if it has none or was cut.

        The reward is 1.0 if the response stopped by itself with the right answer, else 0.0. `key`
        names the sample in `results`.
        """
        answer = self.find_answer(text) if finish_reason == "stop" else None
        if answer and not answer.strip():
            answer = None
        # An empty answer equals no label. `results` then has a reward for this key, too.
        self.compare(key, answer or "", str(label))
        return answer or None

    def compare(self, key, answer, label):
        """Does the work of `submit` for an answer that is already found: decides, or starts a
        comparison."""
        pair = (answer, label)
        self.pairs[key] = pair
        if pair in self.verdicts or pair in self.running:
            return
        verdict = quick_verdict(answer, label)
        if verdict is None:
            self.running[pair] = self.threads.submit(self.ask_worker, answer, label)
        else:
            self.verdicts[pair] = verdict

    def ask_worker(self, answer, label):
        """Runs in a thread. Returns what Worker.ask returns: how the comparison ended."""
        # There are as many workers as threads, so one is idle. Take the one that was used last: its
        # process already runs, so few processes start.
        worker = self.idle_workers.pop()
        try:
            return worker.ask(answer, label)
        except OSError as error:
            raise UserError(
                f"no grading process can be started: {error}; "
                "`python -m nanoorz.algebra 5` says why"
            ) from None
        finally:
            self.idle_workers.append(worker)

    @property
    def lost(self):
        """How many comparisons ended without a verdict."""
        return self.counts["cpu_timeouts"] + self.counts["wall_timeouts"] + self.counts["crashes"]

    def pending(self, seconds):
        """Waits for at most that many seconds. Returns how many comparisons still run."""
        return len(futures.wait(self.running.values(), seconds).not_done)

    def results(self):
        """{key: reward} of all samples since the last call. Waits for all comparisons."""
        for pair, future in self.running.items():
            ending = future.result()
            self.counts[ending] += 1
            self.verdicts[pair] = ending == "equal"
            # A crash or a wall time-out may be an accident, so the next call compares such a pair
            # again.
            if ending == "cpu_timeouts":
                self.too_slow.add(pair)
        rewards = {key: float(self.verdicts[pair]) for key, pair in self.pairs.items()}
        self.pairs = {}
        # The next call does not compare these pairs again.
        self.verdicts = dict.fromkeys(self.too_slow, False)
        self.running = {}
        return rewards

    def close(self):
        """Ends the worker processes and drops the comparisons that still run.

        The worker processes also end with their parent.
        """
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


# ---- numbers for the log -------------------------------------------------------------------------


def text_metrics(text):
    """Numbers that describe the text of a response. They go to the log of the run.

    repetition: the share of the 4-grams of words that stood in the response before. ORZ computes
    this share with suffix arrays, which is slow.
    reflection: how many words show a second thought.
    """
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], words[3:]))
    repetition = (len(grams) - len(set(grams))) / max(1, len(grams))
    reflections = re.findall("wait,|recheck|retry|alternatively,|however,", text.lower())
    return {"repetition": repetition, "reflection": float(len(reflections))}


# ---- python reward.py FILE -----------------------------------------------------------------------


def show(path, options):
    """Prints what a run would read of a file. Returns whether the run would take it."""
    columns = options.pop("columns", None)
    reading = read_file(path, partial(parse_record, columns=columns), **options)
    records = list(reading.records.items())
    print(f"{path}: {len(records)} {reading.unit}s are read")
    for sentence in reading.describe() + describe_sentences(reading):
        print(f"  {sentence}")
    for reason in reading.common_reasons():
        # Bytes that are no text would steer the terminal.
        row = one_line(reading.first_rows[reason])
        print("  left out:", "".join(x if x.isprintable() else "?" for x in row))
    paths = Counter(record["paths"] for _, record in records)
    for (question, label), count in paths.items():
        print(f"  {count} with the question in {question}, the label in {label}")
    if reading.is_refused():
        print(f"A run refuses this file, because too little of it is read; {NAME_COLUMNS}.")
        return False
    for place in sorted({0, len(records) // 2, len(records) - 1}):
        number, record = records[place]
        print(f"{reading.unit} {number}")
        for name in ("system", "question", "label"):
            if record[name]:
                print(f"  {name:8}  {one_line(record[name])}")
    with Grader(workers=2) as grader:
        for number, record in records:
            response = rf"<answer>\boxed{{{record['label']}}}</answer>"
            grader.submit(number, response, "stop", record["label"])
        rewards = grader.results()
    questions = {record["question"] for _, record in records}
    print(f"{len(questions)} of the questions are different")
    numbers = sum(parse_number(record["label"]) is not None for _, record in records)
    print(f"{numbers / len(records):.2%} of the labels are numbers")
    right = sum(rewards.values()) / len(records)
    print(f"{right:.2%} of the labels are accepted as an answer to themselves")
    wrong = [number for number, reward in rewards.items() if not reward]
    for number in wrong[:3]:
        label = one_line(reading.records[number]["label"])
        print(f"  not accepted: {reading.unit} {number}: {label}")
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # The reader of the output may end first.
    try:
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            raise UserError(
                "give one path: python reward.py FILE, or 'FILE?columns=QUESTION,LABEL'"
            )
        is_taken = show(*split_path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if is_taken else 2)
