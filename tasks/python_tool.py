r"""The task python_tool: math problems, and a reply is the output of a program of the policy.

    python train.py --model Qwen/Qwen2.5-1.5B --task python_tool --data openai/gsm8k:main

A response looks like this:

    I count them.
    ```python
    print(sum(n % 7 == 0 for n in range(100)))
    ```
    ```output
    15
    ```
    So it is <answer> \boxed{15} </answer>

A turn ends with ```output. The program runs in the jail of tasks/jail.py, in a new process each
time, so no variable lives on. It may import the packages of this Python, such as sympy. Problems
and grader are those of reward.py: the answer must be in what the policy has drawn.
"""

import functools
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from subprocess import STDOUT

import reward
from reward import ANSWER_FORMS, text_metrics
from tasks.jail import Jail

__all__ = ["ANSWER_FORMS", "PLAIN_REPLIES", "STOP"]
__all__ += ["Grader", "load_problems", "reply", "text_metrics"]

STOP = ["```output", "</answer>"]
# A program may print the special tokens of the tokenizer. They stay plain text.
PLAIN_REPLIES = True

CPU_SECONDS = 10
WALL_SECONDS = 60
MOST_BYTES = 1 << 20  # More output is not read.
LONGEST = 1000  # A longer output keeps so many characters: half of them from its end.
TOOL = (
    "You may use Python: write a program between ```python and ```, and then ```output. You then "
    "see what the program has printed. "
)
TEMPLATES = {
    "orz": reward.TEMPLATES["orz"].replace("User: You must", f"User: {TOOL}You must"),
    "plain": "{question}",
    "chat": "{question}\n\n" + TOOL + "Put the final answer into <answer> \\boxed{} </answer>.",
}
load_problems = functools.partial(reward.load_problems, templates=TEMPLATES)


class Grader(reward.Grader):
    """Makes the jail and the threads of `reply`, and ends them."""

    def __init__(self, workers=1, answer_form="orz"):
        super().__init__(workers, answer_form)
        # The function `reply` is called without the grader, so it has them as attributes.
        self.jail = reply.jail = Jail(CPU_SECONDS, WALL_SECONDS, packages=True)
        self.tool_threads = reply.threads = ThreadPoolExecutor(workers)

    def close(self):
        super().close()
        self.tool_threads.shutdown(wait=False, cancel_futures=True)
        self.jail.close()


def reply(text, finish_reason, label):
    """The reply: a Future of what the turn's program prints, or a text if the turn has no program.

    The result is None if the turn does not ask for a reply.
    """
    if finish_reason != "stop" or not text.endswith("```output"):
        return None
    turn = text.removesuffix("```output")
    _, _, last_reply = turn.rpartition("```output")
    if last_reply != turn:
        # A reply ends with its only ```, and then the turn begins.
        _, _, turn = last_reply.partition("```\n")
    _, found, program = turn.rpartition("```python\n")
    if not found:
        return to_reply("there is no block of Python")
    program, _, _ = program.partition("```")
    return reply.threads.submit(run_program, reply.jail, program)


def run_program(jail, program):
    """The reply to a program: what it has printed, and its error or what ended it."""
    with jail.start(["-"], program.encode(errors="replace"), stderr=STDOUT) as process:
        output = process.stdout.read(MOST_BYTES)
        # With more output the program has not ended, and may never end.
        code = process.wait() if len(output) < MOST_BYTES else 0
    text = output.decode(errors="replace").strip()
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}\n...\n{text[-LONGEST // 2 :]}"
    # bwrap returns 128 + the number of the signal that ended the program.
    if code == -signal.SIGKILL:
        text += f"\nstopped: it took more than {jail.wall_seconds} s"
    elif code == 128 + signal.SIGXCPU:
        text += f"\nstopped: it used more than {CPU_SECONDS} s of CPU time"
    elif 128 < code <= 128 + 64:
        text += f"\nstopped by signal {code - 128}"
    return to_reply(text.strip() or "nothing was printed")


def to_reply(text):
    """The text of a reply. ``` ends it, so it is nowhere else in it."""
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "?", text.replace("```", "'''"))
    return f"\n{shown}\n```\n"
