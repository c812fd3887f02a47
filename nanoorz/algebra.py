"""Algebra for answers: a process of its own, because algebra may hang, crash or take all memory.

A `Worker` starts this process, and asks it where no rule of equal.py decides.

Only the grammar of math-verify and its function `verify` are used. Open-Reasoner-Zero also calls
its function `parse`, which reads letters as units (2m = 2), makes symbols lower-case (R = r), and
evaluates text as code. The text of a model must never be evaluated.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE, Popen

from nanoorz.equal import drop_tail, prepare

# ---- the trainer's side --------------------------------------------------------------------------


class Worker:
    """Starts the process at the first question, and again at the next one if it has ended.

    worker = Worker(cpu_seconds=5.0, wall_seconds=120.0)
    worker.ask("2x", "x+x")  # True
    worker.close()
    """

    def __init__(self, cpu_seconds, wall_seconds):
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.process = None
        self.is_closed = False

    def ask(self, answer, label):
        """Are the texts equal by algebra? None: the process ran out of time, or it crashed.

        A text has equal.MAX_TEXT characters at most. Then both fit into a pipe of 64 KB, because a
        character takes at most 12 bytes of JSON, and a write never waits for a process that hangs.
        Raises OSError if no process can be started.
        """
        if self.process is None or self.process.poll() is not None:
            self.start()
        verdict = b""
        # The process may end before it has read the question: BrokenPipeError. `close`, in another
        # thread, may have closed the pipes: ValueError.
        with contextlib.suppress(BrokenPipeError, ValueError):
            # In JSON also a character that UTF-8 cannot hold, half of a surrogate pair, is ASCII.
            self.process.stdin.write(json.dumps([answer, label]).encode() + b"\n")
            if wait([self.process.stdout], self.wall_seconds):
                verdict = self.process.stdout.readline()
        if not verdict:
            self.end()
            return None
        return verdict == b"equal\n"

    def start(self):
        """Starts the process, and waits until it has made its imports, which take 2 s."""
        command = [sys.executable, "-m", "nanoorz.algebra", str(self.cpu_seconds)]
        # The order of terms in sympy depends on the hashes of texts. Without a seed these differ
        # from process to process.
        variables = os.environ | {"PYTHONHASHSEED": "0"}
        root = Path(__file__).parent.parent
        self.process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, cwd=root, env=variables)
        # `close` may have run before this process was there.
        if self.is_closed:
            self.process.kill()
        if self.process.stdout.readline() != b"ready\n":
            raise ChildProcessError(f"{' '.join(command)} ended before its first check")

    def end(self):
        # The end of the `with` closes the pipes and waits for the end of the process.
        with self.process:
            self.process.kill()

    def close(self):
        """Ends the process. Another thread may be in `ask`, and leaves no process behind."""
        self.is_closed = True
        if self.process is not None:
            self.end()


# ---- inside the process --------------------------------------------------------------------------


def symbolic_verdict(answer, label):
    """Are the texts equal by algebra? It may raise an error, hang, or take all memory.

    `verify` does not treat its two sides alike: the label is the gold side. `verify` with exchanged
    sides would accept the answer 2, 1 for the label (1, 2).
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify

    spelling = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    symbols = ConversionConfig(lowercase_symbols=False)
    expressions = []
    for text in prepare(answer, label):
        # A word behind a number is a unit. Without a number, or if words stand before it, the word
        # may be the answer itself.
        if re.search(r"[0-9]|\\pi", text) and not re.match("[A-Za-z]{3}", text):
            text = drop_tail(text)
        # (3,125) -> (3, 125). `prepare` has removed the commas of thousands, so each comma that is
        # left separates two members.
        text = text.replace(",", ", ")
        # 1e6 -> 1\times 10^{6}, because the grammar reads e as a letter.
        text = re.sub(r"(?<=[0-9])[eE]([+-]?[0-9]{1,3})(?![0-9])", r"\\times 10^{\1}", text)
        # 3+5i -> 3+5{I}, the imaginary unit
        text = re.sub(r"(?<![A-Za-z\\])[iI](?![A-Za-z])", "{I}", text)
        expression = latex2sympy(
            text, is_real=True, normalization_config=spelling, conversion_config=symbols
        )
        # `doit` computes sums, powers and the like. Without it `verify` does not compare exactly.
        expressions.append(expression.doit())
    given, gold = assume_positive(expressions)
    # At 15 digits, the default, all numbers below 1e-15 would equal 0. allow_set_relation_comp lets
    # x > 5 equal (5, \infty). The time-outs of math-verify are off: `serve` has its own.
    return verify(
        gold, given, numeric_precision=60, allow_set_relation_comp=True, timeout_seconds=None
    )


def assume_positive(expressions):
    r"""If a text has a root of n or of 1/n, then n is positive: \frac{1}{\sqrt n} = \sqrt{1/n}."""
    import sympy

    positive = {}
    for power in set().union(*(expression.atoms(sympy.Pow) for expression in expressions)):
        base, exponent = power.as_base_exp()
        factor, rest = base.as_coeff_Mul()
        if exponent.is_Rational and exponent.q % 2 == 0 and factor.is_positive:
            for symbol, degree in rest.as_powers_dict().items():
                # \sqrt{x^2} may have a negative x.
                if symbol.is_Symbol and degree.is_odd:
                    positive[symbol] = sympy.Symbol(symbol.name, positive=True)
    return [expression.xreplace(positive) for expression in expressions]


def serve(cpu_seconds):
    """The worker process: reads lines of JSON, [answer, label], and writes a line for each of them.

    If a comparison uses more than `cpu_seconds` of CPU time, the kernel sends SIGPROF. This signal
    has no handler, so it ends the process, also inside C code.
    """
    limit_process()
    import sympy

    # sympy imports some modules at their first use, and some of these imports need what
    # forbid_evaluation replaces. These comparisons make such imports. Their verdicts do not matter.
    for pair in ("ab+2a a(b+2)", "x>5 (5,\\infty)", "2x=4y x-2y=0", "\\cos{x} \\sin{x}"):
        symbolic_verdict(*pair.split())
    forbid_evaluation()
    os.write(1, b"ready\n")
    for line in sys.stdin.buffer:
        # A verdict must not depend on the comparisons before it.
        sympy.core.cache.clear_cache()
        sympy.core.random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            is_equal = symbolic_verdict(*json.loads(line))
        except Exception:
            is_equal = False  # A text is outside of the grammar, or nested too deep.
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, b"equal\n" if is_equal else b"different\n")


def limit_process():
    """Lets this process end with its parent, ignore signals to stop, and have 2 GiB at most."""
    # The process ends when the thread that started it ends, which is a thread of the Grader.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Ctrl-C sends a signal to the trainer and to its children. If it ended this process, the answer
    # would count as wrong.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A normal comparison needs 80 MB.
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # bytes
    # math-verify warns at each call that its own time-outs are off.
    logging.disable()


def forbid_evaluation():
    """Replaces the two functions with which sympy runs text as code."""
    import sympy.parsing.sympy_parser

    # parse_expr would evaluate the text of a number. Rational reads the exact number.
    sympy.parsing.sympy_parser.parse_expr = lambda text, **options: sympy.Rational(text)
    # For infinite sums sympy's lambdify runs text by exec. In its module the name `exec` is None
    # from now on. So such a comparison raises an error, and the answer counts as wrong.
    sys.modules["sympy.utilities.lambdify"].exec = None


if __name__ == "__main__":
    serve(float(sys.argv[1]))
