"""The task: problems and their prompts, and the rewards of responses. Swap this file to change it.

It sees only text. Deviations from Open-Reasoner-Zero (ORZ: playground/orz_7b_ppo.py):
- ORZ allows a check 1 s of wall time, time in the queue included, in threads that nobody can kill,
  so a busy machine loses right answers. Here the kernel ends a check by the CPU time of that check
  alone, so a reward does not depend on load.
- ORZ compares floats. Here numbers are exact: a decimal is right only where it equals the label,
  and 0.333333 is not 1/3.
- ORZ calls the parser of math-verify, which misreads symbols and evaluates text. Here only its
  grammar and its comparison are used (lib/equal.py).

Copied together with lib/equal.py and lib/common.py it works alone:
`python -c "import reward; print(reward.is_equiv('1/2', '0.5'))"`.
"""

import json
import os
import re
from concurrent import futures
from dataclasses import dataclass

from lib.common import UserError, one_line
from lib.equal import Worker, quick_verdict

# The places are filled by str.replace, because the braces of \boxed{} break str.format.
# "orz" is a protocol constant: models trained with it need all of it.
TEMPLATES: dict[str, str] = {
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
    # train.py makes this a user's turn in the tokenizer's own chat template.
    "chat": "{question}",
}

# The ways in which a worker is lost.
LOST_WAYS = ("cpu_timeouts", "wall_timeouts", "crashes")


@dataclass(frozen=True)
class Problem:
    index: int  # position among all problems
    question: str
    # The right answer as text. Another task may put its tests here.
    label: object
    prompt: str  # the template with the question in it
    # train.py fills in what its tokenizer makes of the prompt.
    prompt_ids: list[int] | None = None


def load_problems(path, template, bos="", columns=("question", "answer"), split="train"):
    """The problems of a JSON or JSONL file, or of a dataset.

    Files may have the forms of ORZ's training and evaluation data, of GSM8K, or records with these
    `columns`. A path that is no file is a dataset's folder or "name:config". `template` is a key
    of TEMPLATES or a text with {question}. Raises UserError, which names the file, the line or
    item (counted from 1) and what is missing or wrong there.
    """
    template = TEMPLATES.get(template, template).replace("{bos}", bos)
    if "{question}" not in template:
        raise UserError(
            f"template {template!r}: choose {', '.join(TEMPLATES)}, or a text with {{question}}"
        )
    is_jsonl = path.endswith(".jsonl")
    unit = "line" if is_jsonl else "item"
    problems = []
    place = path
    try:
        for number, row in enumerate(load_rows(path, split), start=1):
            place = f"{path}: {unit} {number}"
            if is_jsonl and not row.strip():
                continue
            record = json.loads(row) if is_jsonl else row
            question, label = parse_record(record, columns)
            prompt = template.replace("{question}", question)
            problems.append(Problem(len(problems), question, label, prompt))
    # The datasets library alone has a dozen classes of errors for "not found".
    except Exception as error:
        raise UserError(
            f"{place} cannot be read: {type(error).__name__}: {one_line(error)}; give a list of "
            f"ORZ's or GSM8K's items, columns {columns}, or a dataset with split {split!r}"
        ) from None
    if not problems:
        raise UserError(f"{path}: holds no problems; give a file or split with at least one")
    return problems


def load_rows(path, split):
    """The lines of a .jsonl file, the items of another file's JSON list, or a dataset's rows."""
    if path.endswith((".json", ".jsonl")) or os.path.isfile(path):
        # Only \n ends a line, because a question may hold other ends of line.
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            if path.endswith(".jsonl"):
                return file.readlines()
            return list(json.load(file))
    import datasets  # slow, and seldom needed

    try:
        dataset = datasets.load_from_disk(path)
    except FileNotFoundError:
        # It was not saved by that library, so it is a folder of files, or "name:config".
        dataset = datasets.load_dataset(*path.split(":", 1))
    return dataset[split] if isinstance(dataset, dict) else dataset


def parse_record(record, columns):
    """The question and the label of a record. A wrong form raises whatever it runs into."""
    if isinstance(record, list):  # ORZ, training
        question = record[0]["value"]
        value = record[1]["ground_truth"]["value"]
    elif "final_answer" in record:  # ORZ, evaluation
        question = record["prompt"][0]["value"]
        value = record["final_answer"]
    else:
        question = record[columns[0]]
        value = record[columns[1]]
    # The encoding raises where a surrogate has lost its partner.
    if not isinstance(question, str) or not question.encode().strip():
        raise ValueError(f"its question is no text: {question!r:.99}")
    # GSM8K puts the worked solution before the answer.
    label = str(value).rpartition("####")[2].strip()
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not is_plain or not label or "\n" in label:
        raise ValueError(f"lacks an answer of one line (GSM8K: after '#### '): {value!r:.99}")
    return question, label


# ---- answers -------------------------------------------------------------------------------------


def extract_answer(text):
    r"""ORZ's form: the content of the last balanced \boxed{} in the last closed answer block.

    The block lies between the last </answer> and the last <answer> before it. As in ORZ, a box
    elsewhere is no answer, nor is one in a block that the length limit or another stop string left
    unclosed.
    """
    end = max(text.rfind("</answer>"), 0)
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    block = text[start:end]
    return last_box(block)


def last_box(text):
    r"""The form of most instruct models: the content of the last balanced \boxed{} anywhere."""
    answer = None
    answer_start = 0
    # One pass keeps a stack of the open braces: for each, where its content starts if it is a
    # box's, else 0. A closing brace ends the innermost of them. If that is a box that starts behind
    # the last answer, it is the new answer. An escaped brace is one token with its backslash, so it
    # opens and closes nothing. Of nested boxes the inner one wins.
    content_starts = []
    for token in re.finditer(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", text, re.DOTALL):
        if token[0] == r"\boxed{":
            content_starts.append(token.end())
        elif token[0] == "{":
            content_starts.append(0)
        elif token[0] == "}" and content_starts:
            content_start = content_starts.pop()
            if content_start > answer_start:
                answer_start = content_start
                answer = text[content_start : token.start()]
    return answer


def last_number(text):
    """The last decimal numeral, with or without commas between its thousands.

    A minus behind a digit, a letter or a bracket is an operation. Of 1/2 this is the 2.
    """
    minus = r"(?:(?<![\w)\]}])[-−–]\$?)?"
    numerals = re.findall(minus + r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)", text)
    if numerals:
        return numerals[-1]


def after_hashes(text):
    """GSM8K's form: what stands behind the last #### in the same line."""
    _, found, rest = text.rpartition("####")
    if found:
        return rest.partition("\n")[0].strip("#* ")


# By the names of --answer_form. A form is a function from a response to its answer; None and ""
# mean that there is no answer.
ANSWER_FORMS = {
    "orz": extract_answer,
    "boxed_anywhere": last_box,
    "last_number": last_number,
    "hashes": after_hashes,
}


# ---- grading -------------------------------------------------------------------------------------


def is_equiv(predicted, label):
    """Is the predicted answer right? Any text is safe: only a worker process may die of it.

    Raises UserError where no such process can be started. Its start takes 2 s, so whoever has many
    answers to compare takes a Grader.
    """
    with Grader() as grader:
        grader.compare("is_equiv", predicted, label)
        return bool(grader.results()["is_equiv"])


class Grader:
    """Grades samples as they end: at once where a quick rule decides, else in worker processes.

    A check is ended and counts as 0 after `cpu_seconds` of its own CPU time, or after
    `wall_seconds` in case it hangs idle. Workers start by need, and lost ones are replaced. Equal
    pairs share a check until `results`, and for ever if it used up its CPU time. `counts` never go
    back to 0. `broken` is None, or says why no worker starts, and then `results` raises UserError.
    `answer_form` is a key of ANSWER_FORMS.
    """

    def __init__(self, workers=1, answer_form="orz", cpu_seconds=5.0, wall_seconds=120.0):
        self.find_answer = ANSWER_FORMS[answer_form]
        self.wall_seconds = wall_seconds
        self.counts = dict.fromkeys(("symbolic", *LOST_WAYS), 0)
        self.broken = None
        self.hopeless = {}  # pair that used up its CPU time -> False
        self.pairs = {}  # key -> (predicted, label)
        self.verdicts = {}  # pair -> bool
        self.running = {}  # pair -> Future of a reply
        self.workers = [Worker(cpu_seconds) for _ in range(workers)]
        # Each thread hands a pair to an idle worker and waits for it. It takes the one that was
        # used last, so that no more of them start than are needed.
        self.threads = futures.ThreadPoolExecutor(workers)
        self.idle_workers = list(self.workers)

    def submit(self, key, text, finish_reason, label):
        """Takes a finished sample and returns at once its answer, or None if it has none.

        The reward is 1.0 if the response stopped by itself with the right answer, else 0.0. `key`
        names the sample in `results`.
        """
        answer = self.find_answer(text) if finish_reason == "stop" else None
        self.compare(key, answer or "", str(label))
        return answer or None

    def compare(self, key, predicted, label):
        pair = (predicted, label)
        self.pairs[key] = pair
        if pair in self.verdicts or pair in self.running:
            return
        verdict = quick_verdict(predicted, label)
        if verdict is None:
            self.counts["symbolic"] += 1
            self.running[pair] = self.threads.submit(self.ask_worker, predicted, label)
        else:
            self.verdicts[pair] = verdict

    def ask_worker(self, predicted, label):
        """Asks an idle worker; it runs in a thread. Returns what `Worker.ask` returns."""
        worker = self.idle_workers.pop()
        try:
            return worker.ask(predicted, label, self.wall_seconds)
        except OSError as error:
            # The others must hear of it: `results` would end this rank alone.
            self.broken = f"no grading process can be started: {error}; run.log may say why"
            raise UserError(self.broken) from None
        finally:
            self.idle_workers.append(worker)

    @property
    def lost(self):
        """Checks that ended without a verdict."""
        return sum(self.counts[way] for way in LOST_WAYS)

    def pending(self, seconds):
        """Waits for at most so long. Returns how many verdicts are still to come."""
        return len(futures.wait(self.running.values(), seconds).not_done)

    def results(self):
        """{key: reward} of all samples since the last call. It waits for pending checks."""
        for pair, future in self.running.items():
            reply = future.result()
            self.verdicts[pair] = reply == "equal"
            # A lost worker is counted under the way in which it was lost.
            if reply in LOST_WAYS:
                self.counts[reply] += 1
            # It would use up as much at each step. What was lost otherwise is tried again.
            if reply == "cpu_timeouts":
                self.hopeless[pair] = False
        rewards = {key: float(self.verdicts[pair]) for key, pair in self.pairs.items()}
        self.pairs = {}
        self.verdicts = self.hopeless.copy()
        self.running = {}
        return rewards

    def close(self):
        """Ends the workers and drops what is pending. They also end with their parent."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.kill()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def text_metrics(text):
    """Counts of a response's words.

    repetition: the share of its word 4-grams that came before (ORZ: suffix arrays, slow).
    reflection: how many words of second thought it has.
    """
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], words[3:]))
    repetition = (len(grams) - len(set(grams))) / max(1, len(grams))
    lowered = text.lower()
    second_thoughts = ("wait,", "recheck", "retry", "alternatively,", "however,")
    reflection = sum(lowered.count(word) for word in second_thoughts)
    return {"repetition": repetition, "reflection": float(reflection)}
