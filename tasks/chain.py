"""The task chain: look letters up in a table, one in each turn.

    python tools/base_model.py chain out/chain/base
    python train.py $(xargs < out/chain/base/flags.txt)

    question  Fh,Ji,Ea,Hd,Dc,Ag,Cf,Gj,Be,Ib:D    begin with D
    response  c+C f+F h+H a-A g+G j+J i+I b      the policy draws the small letters alone

The environment replies to each letter with a verdict (`+` right, `-` wrong) and with this letter as
the next key. The reward is 1.0 if the last letter is that of the right chain. A turn is one small
letter, because all of them are stop texts (STOP). Other text ends the response.
"""

import re

from nanoorz.records import Unusable, read_file
from reward import make_problems
from tasks import countdown

TEMPLATES = {"mini": "{question}"}
TABLE = re.compile(r"[A-J][a-j](,[A-J][a-j])*")
STOP = list("abcdefghij")
RESPONSE = re.compile(r"([a-j][+?-][A-J])*[a-j]")


def load_problems(path, template, bos="", split="train"):
    """A label is {"after": {letter: next letter}, "letters": right chain}. Raises UserError."""
    return make_problems(read_file(path, parse_record, split), template, TEMPLATES, bos)


def parse_record(record):
    """The question and the label of a record {"table": .., "start": .., "steps": ..}."""
    try:
        table, letters = record["table"], record["start"]
        steps = countdown.to_integer(record["steps"])
        after = dict(table.lower().split(","))
        is_usable = TABLE.fullmatch(table) and 3 * len(after) == len(table) + 1
        is_usable = is_usable and len(letters) == 1 and steps > 0
        for _ in range(steps):
            letters += after[letters[-1]]
    except (AttributeError, LookupError, TypeError, ValueError):
        is_usable = False
    if not is_usable:
        raise Unusable('not of the form {"table": "Ab,Bc,Ca", "start": "b", "steps": 3}')
    question = f"{table}:{letters[0].upper()}"
    return {"question": question, "label": {"after": after, "letters": letters}}


def reply(text, finish_reason, label):
    """The verdict about the last letter and the next key, or None if the response is finished."""
    is_last = len(text) >= 3 * len(label["letters"]) - 5
    if finish_reason != "stop" or is_last or not RESPONSE.fullmatch(text):
        return None
    key = text[-2:-1].lower() or label["letters"][0]
    return ("+" if label["after"].get(key) == text[-1] else "-") + text[-1].upper()


class Grader(countdown.Grader):
    def submit(self, key, text, finish_reason, label):
        """Returns the last letter, or None. The text has a newline in place of each reply."""
        pattern = rf"([a-j]\n){{{len(label['letters']) - 2}}}[a-j]"
        is_whole = finish_reason == "stop" and re.fullmatch(pattern, text) is not None
        self.rewards[key] = float(is_whole and text[-1] == label["letters"][-1])
        return text[-1] if is_whole else None


def text_metrics(text):
    """wrong: the share of letters with a `-`. stutter: the share that repeat the letter before."""
    letters = text[::3]
    count = max(1, len(letters))
    stutter = sum(a == b for a, b in zip(letters, letters[1:])) / count
    return {"letters": len(letters), "wrong": text[1::3].count("-") / count, "stutter": stutter}
