"""Variants: subclasses of ppo.Recipe in files of their own, as in `--variant kl_loss my_idea.py`.

The config of a run inherits from all variants and from train.Config. A later variant stands before
the earlier ones, so its `super()` calls them. Only a run with --variant loads this file.
"""

import dataclasses
import difflib
import importlib
import inspect
import sys
import types
import typing
from inspect import get_annotations
from itertools import combinations, islice, permutations
from pathlib import Path
from unittest import mock

from lib.advice import VARIANTS
from lib.common import UserError, name_error


def extend(config: type, words: list[str]) -> type:
    """Makes a class like `config` with the flags and methods of these variants. Raises UserError.

    words: names of files in variants/, or paths that end in .py.
    """
    variants = load(words, config)
    classes, fault = put_in_order(variants, config)
    if fault:
        orders = islice(permutations(zip(words, variants)), 1000)
        right = [x for x in orders if not put_in_order([variant for _, variant in x], config)[1]]
        told = " ".join(["use --variant", *dict(right[0])]) if right else "leave one of them out"
        require(False, f"{' '.join(words)}: {fault}; {told}")
    for one, two in combinations(classes, 2):
        check_pair(one, two, config)
    flags = {}
    members = {"texts": {}, "estimators": dict(config.estimators)}
    for variant in classes:
        # Python alone would prefer the default of a base to that of an earlier variant.
        for name in get_annotations(variant):
            type_ = typing.get_type_hints(variant)[name]
            flags[name] = (name, type_, variant.__dataclass_fields__[name])
        name = variant.__module__.removeprefix("variants.")
        members["texts"][name] = Path(inspect.getfile(variant)).read_text(encoding="utf-8")
    for variant in variants:
        for name, entry in variant.estimators.items():
            is_free = members["estimators"].setdefault(name, entry) is entry
            require(is_free, f"{variant.__name__}: there is an estimator {name}; rename yours")
    bases = (*reversed(variants), config)
    return dataclasses.make_dataclass("Config", flags.values(), bases=bases, namespace=members)


def load(words: list[str], config: type) -> list[type]:
    """Imports the files of these words as variants.NAME. Returns the class of each."""
    paths = {}
    for word in words:
        path = Path(word) if word.endswith(".py") else VARIANTS / f"{word}.py"
        known = [*(x.stem for x in VARIANTS.glob("*.py")), *map(str, Path().glob("*.py"))]
        near = " or ".join(difflib.get_close_matches(word, known)) or "a file of variants/"
        require(path.is_file(), f"{word}: there is no file {path}; choose {near}, or give a path")
        require(path.stem not in paths, f"{word}: a variant called {path.stem} is there already")
        paths[path.stem] = path.resolve()
    # An earlier call may have imported other files of these names.
    for name in [x for x in sys.modules if x.startswith("variants.")]:
        del sys.modules[name]
    package = sys.modules["variants"] = types.ModuleType("variants")
    package.__path__ = [*dict.fromkeys(str(path.parent) for path in paths.values()), str(VARIANTS)]
    importlib.invalidate_caches()
    return [load_class(word, path, config) for word, path in zip(words, paths.values())]


def load_class(word, path, config) -> type:
    try:
        # Cached bytecode could be that of an older text.
        with mock.patch.object(sys, "dont_write_bytecode", True):
            module = importlib.import_module(f"variants.{path.stem}")
    # A variant is any program. It may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(f"--variant {word}: {name_error(error)}") from error
    require(Path(module.__file__) == path, f"{word}: {module.__file__} has this name; rename one")
    recipe = config.__mro__[-2]
    own = [x for _, x in inspect.getmembers(module, inspect.isclass) if issubclass(x, recipe)]
    own = [x for x in own if x.__module__ == module.__name__]
    found = [x for x in own if sum(issubclass(y, x) for y in own) == 1]
    names = ", ".join(x.__name__ for x in found) or "none"
    require(len(found) == 1, f"{word} must have one subclass of {recipe.__name__}, and has {names}")
    for variant in set(found[0].__mro__) - set(config.__mro__):
        check_members(variant, config)
    return found[0]


def put_in_order(variants: list[type], config: type) -> tuple[list[type], str]:
    """The variants with all that they build on, in this order, and why it cannot work, or ""."""
    try:
        order = type("Config", (*reversed(variants), config), {}).__mro__[1:]
    except TypeError:
        return [], "a variant must come after those that it builds on"
    classes = [x for x in reversed(order) if x not in config.__mro__]
    for early, late in combinations(classes, 2):
        for name in [] if issubclass(late, early) else own_methods(early) & own_methods(late):
            # A method that names super() has a cell for the class.
            if "__class__" not in inspect.unwrap(vars(late)[name]).__code__.co_freevars:
                lost = f"{early.__name__}.{name}"
                return [], f"{late.__name__}.{name} has no super(), so it would undo {lost}"
    return classes, ""


def own_methods(variant: type) -> set[str]:
    return {name for name, x in vars(variant).items() if inspect.isfunction(x) and name[0] != "_"}


def check_members(variant: type, config: type):
    """Refuses a flag or a method that the run would not use."""
    core = typing.get_type_hints(config)
    methods = own_methods(config.__mro__[-2])
    for name in get_annotations(variant):
        flag = f"{variant.__name__}.{name}"
        require("__dataclass_fields__" in vars(variant), f"{flag}: put @dataclass over the class")
        has_help = variant.__dataclass_fields__[name].metadata.get("help")
        require(has_help, f'{flag} has no help; write `{name}: TYPE = flag(DEFAULT, "HELP")`')
        is_like = typing.get_type_hints(variant)[name] == core.get(name)
        told = f"{flag} must have another name, or the type of the core's --{name}"
        require(is_like or not hasattr(config, name), told)
    flags = {*get_annotations(variant), "estimators"}
    for name in [x for x in vars(variant) if x[0] != "_" and x not in flags]:
        near = " or ".join(difflib.get_close_matches(name, [*methods, *core])) or "its method"
        told = f"{variant.__name__}.{name} is no method of the recipe, and no flag with a type"
        require(name in methods, f"{told}; write {near}, or begin the name of a helper with _")
        wanted = list(inspect.signature(getattr(config, name)).parameters)
        found = name in own_methods(variant) and inspect.signature(vars(variant)[name]).parameters
        told = f"{variant.__name__}.{name} must be a method with ({', '.join(wanted)})"
        require(found and list(found) == wanted, told)


def check_pair(one: type, two: type, config: type):
    """Refuses two variants, neither built on the other, of which one hides a part of the other."""
    shared = {one.__name__} & {two.__name__}
    shared |= {x for x in vars(one).keys() & vars(two).keys() if x[0] == "_" and x[:2] != "__"}
    for name in get_annotations(one).keys() & get_annotations(two).keys():
        # Both may give a flag of the core the same new default.
        if getattr(one, name, one) != getattr(two, name, two) or not hasattr(config, name):
            shared.add(name)
    names = f"{one.__name__} and {two.__name__} both have the name {', '.join(sorted(shared))}"
    require(issubclass(two, one) or not shared, f"{names}; rename one, or leave one out")


def require(holds, message):
    if not holds:
        raise UserError(f"--variant {message}")
