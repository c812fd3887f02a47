r"""Math problems with Python as a tool: the policy writes a program, and the reply is its output.

Use it with --task python_tool --stop '```output' '</answer>'. A response looks like this:

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
import signal
from concurrent.futures import ThreadPoolExecutor
from subprocess import STDOUT

import reward
from reward import ANSWER_FORMS, text_metrics
from tasks.jail import Jail

__all__ = ["ANSWER_FORMS", "Grader", "load_problems", "reply", "text_metrics"]

CPU_SECONDS = 10
WALL_SECONDS = 60
LONGEST = 1000  # characters that a reply has of a program's output
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
    """The jail and the threads of `reply` begin and end with the grader."""

    def __init__(self, workers=1, answer_form="orz"):
        super().__init__(workers, answer_form)
        # As many programs run at a time as the sampler has cores to spare.
        reply.jail = Jail(CPU_SECONDS, WALL_SECONDS, packages=True)
        reply.threads = ThreadPoolExecutor(workers)

    def close(self):
        super().close()
        reply.threads.shutdown(wait=False, cancel_futures=True)
        reply.jail.close()


def reply(text, finish_reason, label):
    """A Future of the output of the turn's program, or None if the turn does not ask for one."""
    if finish_reason != "stop" or not text.endswith("```output"):
        return None
    # Without the stop text and without the turns before.
    turn = text.removesuffix("```output").rpartition("```output")[2]
    _, _, program = turn.rpartition("```python\n")
    return reply.threads.submit(answer_program, reply.jail, program.partition("```")[0])


def answer_program(jail, program):
    """The reply to a program: what it printed, and its error or what ended it."""
    with jail.start(["-"], program.encode(errors="replace"), stderr=STDOUT) as process:
        # What is behind these bytes is not read.
        output = process.stdout.read(1 << 20)
        code = 0 if len(output) == 1 << 20 else process.wait()
    text = output.decode(errors="replace").strip()
    if len(text) > LONGEST:
        # The end is there, because it may be an error.
        text = f"{text[: LONGEST // 2]}\n...\n{text[-LONGEST // 2 :]}"
    if code == -signal.SIGKILL:
        text += f"\nstopped: it took more than {WALL_SECONDS} s"
    elif code == 128 + signal.SIGXCPU:
        text += f"\nstopped: it used more than {CPU_SECONDS} s of CPU time"
    elif code > 128:
        text += f"\nstopped by signal {code - 128}"
    return f"\n{text.strip() or 'nothing was printed'}\n```\n"
