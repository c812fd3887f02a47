"""Where the README's figures come from: studies/evidence.json, which docs/evidence.md shows.

    python studies/evidence.py               names the claims whose code has changed since
    python studies/evidence.py write         writes docs/evidence.md
    python studies/evidence.py stamp NAME    the claim NAME was measured now, with the code of HEAD

The hash of a file is that of its code: comments and docstrings do not count. A pattern such as
nanoorz/*.py has one hash of all its files.
"""

import ast
import datetime
import hashlib
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "studies" / "evidence.json"
PAGE = ROOT / "docs" / "evidence.md"
TOP = """# Evidence

`python studies/evidence.py write` has written this page from `studies/evidence.json`. Each claim
has its command, the day, the commit and the machine of its measurement, and the file of its
numbers. *Rests on* names the code that decides the numbers, with a hash. A claim whose code
has changed since then is marked. `make check` names these claims.

"""


def code_of(path: Path) -> str:
    """The file's lines without comments and docstrings. The whole text if it is not Python."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            for row in range(first.lineno - 1, first.end_lineno):
                lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def hash_of(pattern: str) -> str:
    """Eight digits that depend on the code of all files of the pattern."""
    paths = sorted(ROOT.glob(pattern))
    assert paths, f"{pattern}: no file has this name"
    texts = [f"{path.relative_to(ROOT)}\n{code_of(path)}" for path in paths]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def changed(claim: dict) -> list[str]:
    return [pattern for pattern, old in claim["rests on"].items() if hash_of(pattern) != old]


def section(name: str, claim: dict) -> str:
    numbers = claim["numbers"]
    lines = [f"## {name}", "", claim["claim"], "", f"- Command: `{claim['command']}`"]
    lines += [f"- Measured: {claim['date']}, {claim['commit']}, {claim['machine']}"]
    kind = "Test" if numbers.startswith("tests/") else "Numbers"
    lines += [f"- {kind}: [{numbers}](../{numbers})"]
    lines += [f"- {claim['note']}"] if "note" in claim else []
    rests = ", ".join(f"`{pattern}` {digits}" for pattern, digits in claim["rests on"].items())
    lines += [f"- Rests on: {rests}"]
    since = ", ".join(f"`{pattern}`" for pattern in changed(claim))
    lines += [f"- **Changed since**: {since}"] if since else []
    return "\n".join(lines) + "\n"


def stamp(claim: dict):
    git = ["git", "-C", str(ROOT)]
    paths = [f":(glob){pattern}" for pattern in claim["rests on"]]
    subprocess.run([*git, "diff", "--exit-code", "HEAD", "--", *paths], check=True)
    claim["commit"] = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True)[:7]
    claim["date"] = datetime.date.today().isoformat()
    claim["rests on"] = {pattern: hash_of(pattern) for pattern in claim["rests on"]}


def main():
    found = json.loads(CLAIMS.read_text())
    claims = found["claims"]
    if sys.argv[1:2] == ["stamp"]:
        for name in sys.argv[2:]:
            stamp(claims[name])
        CLAIMS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if sys.argv[1:]:
        machines = [f"{name}: {machine}\n" for name, machine in found["machines"].items()]
        PAGE.write_text(TOP + "\n".join(machines + [section(*item) for item in claims.items()]))
    for name, claim in claims.items():
        if patterns := changed(claim):
            print(f"docs/evidence.md: {name}: {', '.join(patterns)} changed since {claim['date']}")


if __name__ == "__main__":
    main()
