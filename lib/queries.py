"""NAME?key=value of a command line: options of a file of problems, switches of a chat template.

Only a run with such a flag loads this file.
"""

import urllib.parse
from pathlib import Path

from lib import check


def data_options(path, file, query) -> dict:
    """The options of load_problems in FILE?split=test&columns=question,answer. Raises UserError."""
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    known = {"columns"} if Path(file).is_file() else {"columns", "split"}
    unknown = set(options) - known
    advice = f"choose {' or '.join(sorted(known))}"
    check.require(not unknown, f"{path}: it has no {', '.join(unknown)}; {advice}")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
        advice = "name two columns, as in FILE?columns=prompt,solution"
        check.require(len(options["columns"]) > 1, f"{path}: {advice}")
    return options
