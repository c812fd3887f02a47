"""How fast, against what: `python tools/bench.py [part ...]`, ratios measured in one run, one JSON line at the end.

python tools/bench.py reward     checks/s on a GSM8K-like mix; are verdicts the same with 1 and with 16 workers?
"""

import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import reward

FORMS = (  # what only sympy can tell, as MATH's labels have it: right and wrong forms of an answer with numbers a, b
    (r"\frac{{{a}}}{{{b}}}x", r"\frac{{{a}x}}{{{b}}}", r"\frac{{{b}x}}{{{a}}}"),
    (r"{a}\sqrt{{{b}}}", r"\sqrt{{{b}}}\cdot {a}", r"{b}\sqrt{{{a}}}"),
)


def reward_pairs(count: int) -> list[tuple[str, str]]:
    """A GSM8K-like mix: 97 % numbers (integers, decimals, money, thousands), 3 % expressions; half of them right."""
    rng, pairs = random.Random(0), []
    for k in range(count):
        a, b, right = rng.randint(1, 9999), rng.randint(2, 99), rng.random() < 0.5
        if k % 33 == 0:
            label, same, other = rng.choice(FORMS)
            pairs.append(((same if right else other).format(a=a, b=b), label.format(a=a, b=b)))
        else:
            shown = rng.choice((f"{a}", f"{a:,}", f"\\${a}", f"{a}.00", f"{a} dollars"))
            pairs.append((shown if right else str(a + b), str(a)))
    return pairs


def bench_reward() -> dict:
    """Checks a second through `Grader`, extraction included, and how many verdicts change with 16 workers."""
    pairs, verdicts, seconds, timeouts = reward_pairs(8192), [], [], 0
    for workers in (1, 2, 16):
        with reward.Grader(workers=workers) as grader:
            grader.compare("warm-up", "x+y", "y+x")  # starts a process, as the first step of a run does
            grader.results()
            begin = time.perf_counter()
            for k, (predicted, label) in enumerate(pairs):
                grader.submit(k, f"<answer>\\boxed{{{predicted}}}</answer>", "stop", label)
            verdicts.append(grader.results())
            seconds.append(time.perf_counter() - begin)
            timeouts += grader.counts["cpu_timeouts"] + grader.counts["wall_timeouts"]
    differ = sum(verdicts[0][k] != verdicts[2][k] for k in range(len(pairs)))
    return {
        "checks_per_s": round(len(pairs) / seconds[1]),
        "pairs": len(pairs),
        "verdicts_differ": differ,
        "right": sum(verdicts[0].values()) / len(pairs),
        "timeouts": timeouts,
    }


if __name__ == "__main__":
    parts = {"reward": bench_reward}
    chosen = sys.argv[1:] or list(parts)
    if unknown := set(chosen) - set(parts):
        sys.exit(f"error: no such part: {' '.join(unknown)}; choose from {', '.join(parts)}")
    print(json.dumps({key: value for part in chosen for key, value in parts[part]().items()}))
