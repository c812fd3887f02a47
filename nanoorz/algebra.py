"""Algebra for answers, in a process of its own, because it may hang, crash or take all memory.

equal.py starts this process (`Worker`) and asks it where no quick rule decides. By hand:
`echo '["2x", "x+x"]' | python -m nanoorz.algebra 5` prints "ready" and then "equal". The 5 means
that a comparison may take 5 seconds of CPU time.

Only the grammar of math-verify and its function `verify` are used. Open-Reasoner-Zero also calls
its function `parse`. `parse` takes m, h, c and ab for units (2m = 2), makes symbols lower-case
(R^2 - r^2 = 0), and gives plain expressions to sympy's parse_expr, which evaluates text as code.
The text of a model must never be evaluated.
"""

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys

from nanoorz.equal import drop_unit, prepare


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
        # A word behind a number is a unit. Without a number the word may be the answer itself.
        if re.search(r"[0-9]|\\pi", text):
            text = drop_unit(text)
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

    # sympy imports some modules at their first use, and some of these imports call eval. So these
    # comparisons make all such imports before close_sympy. Their verdicts do not matter.
    pairs = (
        ("ab+2a", "a(b+2)"),
        ("x>5", "(5, \\infty)"),
        ("2x=4y", "x-2y=0"),
        ("\\cos x", "\\sin x"),
    )
    for answer, label in pairs:
        symbolic_verdict(answer, label)
    close_sympy()
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


def close_sympy():
    """Replaces the two functions with which sympy runs text as code.

    Call this after sympy's imports, because the imports need these functions.
    """
    import sympy.parsing.sympy_parser

    # parse_expr would evaluate the text of a number. read_number reads the exact number.
    number = re.compile(r"[0-9.]+(?:[eE][+-]?[0-9]{1,3})?")

    def read_number(text, **options):
        return sympy.Rational(number.fullmatch(text)[0])

    sympy.parsing.sympy_parser.parse_expr = read_number
    # For infinite sums sympy's lambdify runs text by exec. In its module the name `exec` is None
    # from now on. So such a comparison raises an error, and the answer counts as wrong.
    sys.modules["sympy.utilities.lambdify"].exec = None


if __name__ == "__main__":
    serve(float(sys.argv[1]))
