"""The words of --variant, and the texts of variants in a run folder. It loads no variant."""

import argparse
import re
from pathlib import Path

from lib.common import UserError

# Up to this commit a variant was a file of functions. Since then it is a class.
LAST_OF_FUNCTIONS = "229d200"
OLD_RUN = (
    "has a variant that is a file of functions, and variants are classes now; the last commit that "
    f"can go on with it is {LAST_OF_FUNCTIONS}; begin another run with its model, which `python "
    "tools/convert.py export` writes"
)


def take_variants(argv) -> tuple[list[str], list[str]]:
    """Returns the words of all --variant, and the other words. `none` drops the variants before it.
    Raises UserError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", nargs="*", action="extend")
    args, rest = parser.parse_known_args(argv)
    words = args.variant
    if words == []:
        raise UserError("--variant names nothing; give a file of variants/, a path, or none")
    words = words or []
    if "none" in words:
        words = words[len(words) - words[::-1].index("none") :]
    return words, rest


def write_variants(cfg, folder):
    """Writes the texts of the variants into a folder. kept_files finds them there."""
    folder.mkdir(exist_ok=True)
    for name, text in cfg.variant_texts.items():
        file = name.removeprefix("variants.")
        (folder / f"{file}.py").write_text(text, encoding="utf-8")


def kept_files(run_dir, hashes) -> list[str]:
    """The words of --variant that give a run its variants again: the texts in its folder.

    hashes: cfg.variant_hashes of that run. A name with a dot is no variant, but a module that one
    of the variants imports.
    """
    return [f"{run_dir}/variants/{name}.py" for name, _ in hashes if "." not in name]


def has_functions(run_dir, hashes) -> bool:
    """Was a variant of this run a file of functions? run_dir, hashes: see kept_files."""
    files = [Path(file) for file in kept_files(run_dir, hashes)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    return not all(re.search(r"^class \w+\(", text, re.MULTILINE) for text in texts)
