"""Variants: subclasses of ppo.Recipe in files of their own, as in `--variant kl_loss my_idea.py`.

The config of a run inherits from all variants and from train.Config. A call of `super()` in a later
variant reaches the earlier ones. Only a run with --variant loads this file.
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
from lib.variant_files import LAST_OF_FUNCTIONS


def extend(config: type, words: list[str]) -> type:
    """Makes a class like `config` with the flags and methods of these variants. Raises UserError.

    words: names of files in variants/, or paths that end in .py.
    """
    variants = load(words, config)
    classes, fault = put_in_order(variants, config)
    if fault:
        orders = islice(permutations(variants), 5000)
        right = next((x for x in orders if put_in_order(x, config)[0]), ())
        order = [words[variants.index(variant)] for variant in right]
        advice = " ".join(["use --variant", *order]) if order else "leave one of them out"
        require(False, f"{' '.join(words)}: {fault}; {advice}")
    flags = {}
    members = {"variant_texts": {}, "estimators": dict(config.estimators)}
    for variant in classes:
        # Python alone would let an old default of a later variant's base hide the new default.
        for name in get_annotations(variant):
            type_ = typing.get_type_hints(variant)[name]
            flags[name] = (name, type_, variant.__dataclass_fields__[name])
    for one, two in combinations(classes, 2):
        shared = set() if issubclass(two, one) else own_names(one) & own_names(two)
        # Both may give a flag of the core the same new default.
        shared -= {x for x in shared if hasattr(config, x) and getattr(one, x) == getattr(two, x)}
        fault = f"{one.__name__} and {two.__name__} both have {sorted(shared)}"
        require(not shared, f"{fault}; rename one, or leave one out")
    for name, entry in [pair for variant in variants for pair in variant.estimators.items()]:
        is_new = members["estimators"].setdefault(name, entry) is entry
        require(is_new and hasattr(entry, "needs_critic"), f"{name} is no new ppo.Estimator")
    # The names of the variants have no dot. Other files that they import have.
    own = [variant.__module__ for variant in classes]
    for name in dict.fromkeys([*own, *(x for x in sys.modules if x.startswith("variants."))]):
        text = Path(sys.modules[name].__file__).read_text(encoding="utf-8")
        members["variant_texts"][name.removeprefix("variants.") if name in own else name] = text
    bases = (*reversed(variants), config)
    return dataclasses.make_dataclass("Config", flags.values(), bases=bases, namespace=members)


def load(words: list[str], config: type) -> list[type]:
    """Imports the files of these words as variants.NAME. Returns the class of each."""
    paths = {}
    for word in words:
        path = Path(word) if word.endswith(".py") else VARIANTS / f"{word}.py"
        if not path.is_file():
            known = [*(x.stem for x in VARIANTS.glob("*.py")), *map(str, Path().glob("*.py"))]
            advice = f"choose {near(word, known) or 'a file of variants/'}, or give a path"
            raise UserError(f"--variant {word}: there is no file {path}; {advice}")
        require(path.stem not in paths, f"{word}: a variant called {path.stem} is there already")
        paths[path.stem] = path.resolve()
    for name in [x for x in sys.modules if x.startswith("variants.")]:
        del sys.modules[name]  # An earlier call may have imported other files.
    # `from variants.log_kl import LogKL` finds the files beside these files, and variants/.
    package = sys.modules["variants"] = types.ModuleType("variants")
    package.__path__ = [*dict.fromkeys(str(path.parent) for path in paths.values()), str(VARIANTS)]
    importlib.invalidate_caches()
    return [load_class(word, path, config) for word, path in zip(words, paths.values())]


def load_class(word, path, config) -> type:
    try:
        # Without this an edit within a second could be hidden by the bytecode of the old text.
        with mock.patch.object(sys, "dont_write_bytecode", True):
            module = importlib.import_module(f"variants.{path.stem}")
    # A variant is any program. It may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(f"--variant {word}: {name_error(error)}") from error
    require(Path(module.__file__) == path, f"{word}: {module.__file__} has this name; rename one")
    recipe = config.__mro__[-2]  # Behind it is only `object`.
    own = {x for _, x in inspect.getmembers(module, inspect.isclass) if issubclass(x, recipe)}
    own = {x for x in own if x.__module__ == module.__name__}
    found = [x for x in own if not any(issubclass(y, x) for y in own if y is not x)]
    fault = f"{word} must have one subclass of {recipe.__name__}"
    require(found, f"{fault}; up to commit {LAST_OF_FUNCTIONS} variants were files of functions")
    require(len(found) == 1, f"{fault}, and has {sorted(x.__name__ for x in found)}")
    for variant in set(found[0].__mro__) - set(config.__mro__):
        check_members(variant, config)
    return found[0]


def put_in_order(variants: list[type], config: type) -> tuple[list[type], str]:
    """Returns the variants with all that they are built on, or [] and why the order is wrong."""
    try:
        order = type("Config", (*reversed(variants), config), {}).__mro__[1:]
    except TypeError:
        return [], "a variant must come after those that it is built on"
    classes = [x for x in reversed(order) if x not in config.__mro__]
    for early, late in combinations(classes, 2):
        for name in set() if issubclass(late, early) else own_methods(early) & own_methods(late):
            # Python gives `__class__` to a function whose text has `super()`.
            if "__class__" not in inspect.unwrap(vars(late)[name]).__code__.co_freevars:
                return [], f"{early.__name__}.{name} is lost: {late.__name__}.{name} has no super()"
    return classes, ""


def own_methods(variant: type) -> set[str]:
    return {name for name, x in vars(variant).items() if inspect.isfunction(x) and name[0] != "_"}


def check_members(variant: type, config: type):
    """Refuses a flag or a method that the run would not use."""
    core = typing.get_type_hints(config)
    flags = get_annotations(variant)
    for name in flags:
        where = f"{variant.__name__}.{name}"
        field = vars(variant).get("__dataclass_fields__", {}).get(name)
        advice = f'write @dataclass, `{name}: TYPE = flag(DEFAULT, "HELP")`; helpers have no type'
        require(field and field.metadata.get("help"), f"{where} is no flag yet: {advice}")
        is_like = typing.get_type_hints(variant)[name] == core.get(name)
        fault = f"{where} must have another name, or the type of the core's --{name}"
        require(is_like or not hasattr(config, name), fault)
    methods = dict(inspect.getmembers(config, inspect.isfunction))
    for name in [x for x in vars(variant) if x[0] != "_" and x not in (*flags, "estimators")]:
        where = f"{variant.__name__}.{name}"
        if name not in methods:
            flag = f"`{name}: TYPE = flag(DEFAULT, 'HELP')`" if name in core else ""
            advice = f"write {flag or near(name, [*methods, *core]) or 'its method'}, or begin the"
            fault = "is no method of the recipe, and no flag with a type"
            raise UserError(f"--variant {where} {fault}; {advice} name of a helper with _")
        wanted = list(inspect.signature(methods[name]).parameters)
        fault = f"{where} must be a method with ({', '.join(wanted)})"
        found = name in own_methods(variant) and inspect.signature(vars(variant)[name]).parameters
        require(found and list(found) == wanted, fault)


def own_names(variant: type) -> set[str]:
    helpers = [name for name in vars(variant) if name[0] == "_" and name[:2] != "__"]
    return {variant.__name__, *get_annotations(variant), *helpers}


def near(word, known) -> str:
    return " or ".join(difflib.get_close_matches(word, known))


def require(holds, message):
    if not holds:
        raise UserError(f"--variant {message}")
