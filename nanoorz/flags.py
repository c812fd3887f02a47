"""The flags of train.py: each field of its dataclass Config is one. `require` refuses a value."""

import argparse
import dataclasses
import typing

from nanoorz.ranks import UserError


def flag(default, help, least=0, most=1e18):
    """A field of a dataclass that becomes a flag of train.py. help: what --help prints. least and
    most: the limits of a number, which train.py checks for its own flags."""
    metadata = {"help": help, "least": least, "most": most}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(cfg) -> dict:
    """{flag: its value}. `vars(cfg)` also has other attributes, which variants have set."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}


def make_parser(config: type) -> argparse.ArgumentParser:
    """A parser with a flag for each field of a dataclass."""
    # A flag that is not given has no value here. So the dataclass takes its default.
    absent = argparse.SUPPRESS
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=absent)
    for name, kind in typing.get_type_hints(config).items():
        parts = typing.get_args(kind)
        if type(None) in parts:  # such as `str | None`
            kind = parts[0]
            parts = typing.get_args(kind)
        if kind is bool:  # --bf16 is the same as --bf16 true
            parser.add_argument(f"--{name}", type=boolean, nargs="?", const=True)
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(f"--{name}", type=type(parts[0]), choices=parts)
        elif typing.get_origin(kind) is list:
            parser.add_argument(f"--{name}", type=parts[0], nargs="*")
        else:
            parser.add_argument(f"--{name}", type=kind)
    return parser


def boolean(word) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError
    return word.lower() == "true"


def require(holds, message):
    """Raises UserError with this message if a condition does not hold."""
    if not holds:
        raise UserError(message)
