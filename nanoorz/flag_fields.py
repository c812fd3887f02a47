"""Flags are fields of a dataclass that have a text of help."""

import dataclasses


def flag(default, help):
    """A field that becomes a flag of train.py. help: what --help prints."""
    value = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**value, metadata={"help": help.replace("%", "%%")})


def flags_of(cfg) -> dict:
    """{flag: its value}. `vars` would also hold what variants keep in `cfg`."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
