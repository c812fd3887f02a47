"""FILE?key=value: options of a file of problems. Only a run with such a path loads this file."""

import urllib.parse
from pathlib import Path

from lib import check


def split_query(path) -> tuple[str, dict]:
    """Splits FILE?split=test&columns=question,answer into FILE and options of load_problems.

    Raises UserError.
    """
    file, _, query = path.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    known = {"columns"} if Path(file).is_file() else {"columns", "split"}
    unknown = set(options) - known
    advice = f"choose {' or '.join(sorted(known))}"
    check.require(not unknown, f"{path}: it has no {', '.join(unknown)}; {advice}")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
        advice = "name two columns, as in FILE?columns=prompt,solution"
        check.require(len(options["columns"]) > 1, f"{path}: {advice}")
    return file, options
