r"""The task: problems and their prompts, answers and their rewards. Another task replaces it.

A task is a module with load_problems, Grader and text_metrics. train.load_task tells what else it
may have.

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

import contextlib
import re
import sys
from collections import Counter
from concurrent import futures
from dataclasses import dataclass
from functools import partial

from nanoorz.algebra import Worker
from nanoorz.equal import parse_number, quick_verdict, respell
from nanoorz.ranks import UserError, one_line
from nanoorz.records import last_box, parse_problem, read_file, split_path, warn

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
    prompt: str  # the template with the question in it; for --template chat the user's turn
    prompt_ids: list[int] | None = None  # train.py fills it
    system: str = ""  # the record's own system turn, for --template chat


def load_problems(path, template, bos="", columns=None, split="train", templates=TEMPLATES):
    """The problems of a file or a data set (nanoorz/records.py).

    columns: the paths of question and label, or None. `template` is a key of `templates` or a text
    with {question}. Raises UserError.
    """
    records = read_file(path, partial(parse_problem, columns=columns), split)
    return make_problems(records, template, templates, bos)


def make_problems(records, template, templates, bos) -> list[Problem]:
    """Other tasks call it with their own records and templates. Raises UserError."""
    prompt_template = templates.get(template, template).replace("{bos}", bos)
    if "{question}" not in prompt_template:
        names = ", ".join(templates)
        raise UserError(f"--template {template}: choose {names}, or write a text with {{question}}")
    problems = []
    for index, record in enumerate(records):
        question, system = record["question"], record.get("system", "")
        prompt = prompt_template.replace("{question}", question)
        problems.append(Problem(index, question, record["label"], prompt, system=system))
    count = sum(problem.system != "" for problem in problems)
    if count and template != "chat":
        warn(f"{count} problems have a system turn; only --template chat has a place for it")
    return problems


# ---- answers -------------------------------------------------------------------------------------


def last_block(text):
    """The text between the last </answer> and the last <answer> before it, or None."""
    head, _, _ = text.rpartition("</answer>")
    _, opened, block = head.rpartition("<answer>")
    return block if opened else None


def extract_answer(text):
    r"""ORZ's form: the content of the last box (last_box) in the last closed answer block.

    As in ORZ, a box outside of the block is no answer. Without </answer> there is no answer.
    """
    block = last_block(text)
    if block is None:
        return None
    return last_box(block)


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
    """Is the answer right? The result is False if the comparison hangs or crashes.

    The start of a worker process takes 2 s, so use one Grader for many answers.
    """
    verdict = quick_verdict(answer, label)
    if verdict is None:
        with contextlib.closing(Worker(cpu_seconds=5.0, wall_seconds=120.0)) as worker:
            verdict = worker.ask(answer, label)
    return bool(verdict)


class Grader:
    """Grades samples as they end. `results` then gives all rewards.

        with Grader(workers=2, answer_form="orz") as grader:
            grader.submit("my key", text, "stop", label)  # returns the answer, or None
            grader.pending(seconds=0.5)  # returns how many comparisons still run
            grader.results()  # waits for all comparisons, and returns {"my key": 1.0}

    A quick rule decides at once whether an answer is right, or a worker process decides later. The
    comparison of a worker ends without a verdict after `cpu_seconds` of its own CPU time, after
    `wall_seconds`, or if its process crashes. Then the reward is 0, and `lost` counts it. The next
    comparison starts another process. Samples with the same answer and label share a comparison
    until `results` returns.
    """

    def __init__(self, workers=1, answer_form="orz", cpu_seconds=5.0, wall_seconds=120.0):
        self.find_answer = ANSWER_FORMS[answer_form]
        self.lost = 0  # comparisons without a verdict, since the start
        # A pair is (answer, label).
        self.pairs = {}  # {key: its pair}
        self.verdicts = {}  # {pair: is it equal?}
        self.running = {}  # {pair: Future of what Worker.ask returns}
        self.workers = [Worker(cpu_seconds, wall_seconds) for _ in range(workers)]
        self.idle_workers = self.workers.copy()
        # There are as many threads as workers. A thread waits for its worker.
        self.threads = futures.ThreadPoolExecutor(workers)

    def submit(self, key, text, finish_reason, label):
        """Takes a finished sample. Returns its answer at once, or None if it has none or was cut.

        The reward is 1.0 if the response stopped by itself with the right answer, else 0.0. `key`
        names the sample in `results`.
        """
        answer = None
        if finish_reason == "stop":
            answer = self.find_answer(text)
        # An empty answer equals no label, so its reward is 0.
        pair = (answer or "", str(label))
        self.pairs[key] = pair
        if pair not in self.verdicts and pair not in self.running:
            verdict = quick_verdict(*pair)
            if verdict is None:
                self.running[pair] = self.threads.submit(self.ask_worker, *pair)
            else:
                self.verdicts[pair] = verdict
        return answer or None

    def ask_worker(self, answer, label):
        """Runs in a thread. Returns what Worker.ask returns."""
        # There are as many workers as threads, so one is idle. `pop` takes the one that was used
        # last, which already has a process.
        worker = self.idle_workers.pop()
        try:
            return worker.ask(answer, label)
        finally:
            self.idle_workers.append(worker)

    def pending(self, seconds):
        """Waits for at most that many seconds. Returns how many comparisons still run."""
        return len(futures.wait(self.running.values(), seconds).not_done)

    def results(self):
        """{key: reward} of all samples since the last call. Waits for all comparisons."""
        for pair, future in self.running.items():
            verdict = future.result()
            self.verdicts[pair] = bool(verdict)
            self.lost += verdict is None
        rewards = {key: float(self.verdicts[pair]) for key, pair in self.pairs.items()}
        self.pairs = {}
        self.verdicts = {}
        self.running = {}
        return rewards

    def close(self):
        """Drops the comparisons that still run, and ends the worker processes.

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


def show(path):
    """Prints what a run would read of a file. Raises UserError if a run would refuse it."""
    file, options = split_path(path)
    columns = options.pop("columns", None)
    records = read_file(file, partial(parse_problem, columns=columns), **options)
    for (question, label), count in Counter(record["paths"] for record in records).items():
        print(f"{count} problems, with the question in {question} and the label in {label}")
    for position in sorted({0, len(records) // 2, len(records) - 1}):
        print()
        for name in ("system", "question", "label"):
            if records[position][name]:
                print(f"{name:8}  {one_line(records[position][name])}")
    labels = [record["label"] for record in records]
    others = [one_line(label) for label in labels if parse_number(respell(label)) is None]
    print(f"\n{len(others)} of {len(labels)} labels are no numbers")
    for label in others[:3]:
        print(f"  {label}")


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            told = "python reward.py FILE, or 'FILE?columns=QUESTION,LABEL'"
            raise UserError(f"give one path: {told}")
        show(sys.argv[1])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
