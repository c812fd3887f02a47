"""Variants: subclasses of ppo.Recipe in files of their own, as in `--variant kl_loss my_idea.py`.

For `--variant a b` the config of a run is of the class `Config(B, A, train.Config)`. So the methods
of B are called first, and their `super()` calls those of A, and then of the recipe.
"""

import argparse
import dataclasses
import importlib
import inspect
import sys
import types
from itertools import combinations
from pathlib import Path

from nanoorz.flags import require

VARIANTS = Path(__file__).resolve().parent.parent / "variants"


def take_variants(argv) -> tuple[list[str], list[str]]:
    """Returns the words after each --variant, and the rest of the command line. A word is the name
    of a file in variants/, or a path that ends in .py."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", nargs="*", action="extend", default=[])
    args, rest = parser.parse_known_args(argv)
    return args.variant, rest


def extend(config: type, words: list[str]) -> type:
    """Makes a class like `config` with the flags, methods and estimators of these variants."""
    if not words:
        return config
    bases = (*reversed(list(load(words, config))), config)
    # All classes, with those that a variant is built on. Calls of super() go from last to first.
    order = type("Order", bases, {}).__mro__
    classes = [x for x in reversed(order[1:]) if x not in config.__mro__]
    # {flag: (name, type, field)}
    fields = {x.name: (x.name, x.type, x) for x in dataclasses.fields(config)}
    estimators = dict(config.estimators)
    texts = {}
    for variant in classes:
        refuse_unknown_names(variant, config)
        if "__dataclass_fields__" not in vars(variant):
            dataclasses.dataclass(variant)
        # Python's inheritance of dataclasses would lose a new default. Say A gives --lambd the
        # default 0.95. The dataclass B also has a field lambd, with the recipe's default, and wins.
        # So all flags are fields of the new class itself.
        for name, kind in inspect.get_annotations(variant).items():
            fields[name] = (name, kind, variant.__dataclass_fields__[name])
        estimators |= vars(variant).get("estimators", {})
        path = Path(inspect.getfile(variant))
        texts[path.stem] = path.read_text(encoding="utf-8")
    for early, late in combinations(classes, 2):
        refuse_lost_methods(early, late)
    own = {"estimators": estimators, "variant_texts": texts}
    return dataclasses.make_dataclass("Config", fields.values(), bases=bases, namespace=own)


def load(words, config):
    """Imports each file as the module variants.NAME. Yields the one subclass that it must have."""
    paths = [Path(x if x.endswith(".py") else f"{VARIANTS}/{x}.py").resolve() for x in words]
    # Another config of this process may have other files of these names.
    for name in [x for x in sys.modules if x.startswith("variants.")]:
        del sys.modules[name]
    # A variant may be built on one beside it, or of variants/: `from variants.log_kl import ...`
    package = sys.modules["variants"] = types.ModuleType("variants")
    package.__path__ = [*(str(path.parent) for path in paths), str(VARIANTS)]
    recipe = config.__mro__[-2]  # ppo.Recipe. The last class of all is `object`.
    for path in paths:
        require(path.is_file(), f"--variant: there is no file {path}")
        module = importlib.import_module(f"variants.{path.stem}")
        told = f"--variant: {module.__file__} has the name of {path}; rename one"
        require(Path(module.__file__) == path, told)
        found = [x for _, x in inspect.getmembers(module, inspect.isclass) if issubclass(x, recipe)]
        [variant] = {x for x in found if x.__module__ == module.__name__}
        yield variant


def refuse_unknown_names(variant, config):
    """Raises UserError for a public name that is no method of the recipe, and no flag."""
    for name in vars(variant).keys() - inspect.get_annotations(variant).keys() - {"estimators"}:
        is_method = inspect.isfunction(getattr(config, name, None))
        told = f"{variant.__name__}.{name} is no method of the recipe, and no flag with a type"
        require(is_method or name[0] == "_", f"--variant: {told}; begin a helper with _")


def refuse_lost_methods(early, late):
    """Raises UserError if a method or helper of `late` hides one of `early` without super()."""
    flags = {"estimators", *inspect.get_annotations(late)}
    for name in vars(early).keys() & vars(late).keys() - flags:
        # Every class has names such as __doc__.
        if name[:2] != "__" and not issubclass(late, early):
            method = vars(late)[name]
            told = f"--variant: {late.__name__}.{name} without super() hides {early.__name__}'s"
            require(calls_super(method), f"{told}; name {late.__name__} first, or leave one out")


def calls_super(method) -> bool:
    """Does a method call super()? Python gives the variable `__class__` to such a method."""
    return inspect.isfunction(method) and "__class__" in inspect.unwrap(method).__code__.co_freevars


def kept_files(run_dir, hashes) -> list[str]:
    """The words after --variant that give a run its variants again. hashes: its variant_hashes."""
    return [f"{run_dir}/variants/{name}.py" for name, _ in hashes]
