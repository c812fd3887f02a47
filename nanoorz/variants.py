"""Variants: subclasses of ppo.Recipe in files of their own, as in `--variant kl_loss my_idea.py`.

A run with variants has a config class of its own, which `extend` makes. For `--variant a b` it is

    class Config(B, A, train.Config): ...

So the methods of B are called first, and their `super()` calls those of A, and then of the recipe.

In this file a *word* is what the user has written behind --variant, such as `a`. A *variant* is the
class in the file of a word, such as A. A variant may inherit from a class in another file.
"""

import argparse
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

from nanoorz.flags import VARIANTS
from nanoorz.ranks import UserError, name_error


def take_variants(argv) -> tuple[list[str], list[str]]:
    """Returns the words of all --variant, and the rest of the command line. Raises UserError.

    `none` drops the words before it, for a user whose script has a --variant that is not wanted.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", nargs="*", action="extend")
    args, rest = parser.parse_known_args(argv)
    words = args.variant
    if words == []:
        raise UserError("--variant names nothing; give a file of variants/, a path, or none")
    words = words or []
    while "none" in words:
        words = words[words.index("none") + 1 :]
    return words, rest


def extend(config: type, words: list[str]) -> type:
    """Makes a class like `config` with the flags and methods of these variants. Raises UserError.

    config: train.Config. words: names of files in variants/, or paths that end in .py.
    """
    variants = load(words, config)
    classes, fault = put_in_order(variants, config)
    if fault:
        advice = suggest_order(words, variants, config)
        raise UserError(f"--variant {' '.join(words)}: {fault}; {advice}")
    check_shared_names(classes, config)
    attributes = {
        "variant_texts": find_texts(classes),
        "estimators": join_estimators(variants, config),
    }
    bases = (*reversed(variants), config)
    flags = find_flags(classes)
    return dataclasses.make_dataclass("Config", flags, bases=bases, namespace=attributes)


def expect(holds, message):
    """Raises UserError about a variant if a condition does not hold."""
    if not holds:
        raise UserError(f"--variant {message}")


def similar(word, known) -> str:
    """The names of `known` that are spelled almost like `word`, or nothing."""
    return " or ".join(difflib.get_close_matches(word, known))


# ---- the files -----------------------------------------------------------------------------------


def load(words: list[str], config: type) -> list[type]:
    """Imports the file of each word as the module variants.NAME. Returns the class of each."""
    paths = {}
    for word in words:
        path = Path(word) if word.endswith(".py") else VARIANTS / f"{word}.py"
        if not path.is_file():
            known = [*(x.stem for x in VARIANTS.glob("*.py")), *map(str, Path().glob("*.py"))]
            advice = f"choose {similar(word, known) or 'a file of variants/'}, or give a path"
            raise UserError(f"--variant {word}: there is no file {path}; {advice}")
        expect(path.stem not in paths, f"{word}: a variant called {path.stem} is there already")
        paths[path.stem] = path.resolve()
    folders = dict.fromkeys(str(path.parent) for path in paths.values())
    make_package([*folders, str(VARIANTS)])
    return [load_class(word, path, config) for word, path in zip(words, paths.values())]


def make_package(folders: list[str]):
    """Makes a package `variants` out of the files of several folders, the first folder first.

    A variant may import another one: `from variants.log_kl import LogKL`. It may be a shipped file,
    or a file of the user.
    """
    # The demo reads the command line twice. Then an earlier call has imported files.
    for name in [x for x in sys.modules if x.startswith("variants.")]:
        del sys.modules[name]
    package = types.ModuleType("variants")
    package.__path__ = folders
    sys.modules["variants"] = package
    importlib.invalidate_caches()


def load_class(word, path, config) -> type:
    """Imports the file of a word, and returns its variant."""
    writes_no_bytecode = sys.dont_write_bytecode
    try:
        # Python compares the times of a file and of its bytecode in whole seconds. So after an edit
        # within a second it would take the bytecode of the old text.
        sys.dont_write_bytecode = True
        module = importlib.import_module(f"variants.{path.stem}")
    # A variant is any program. It may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(f"--variant {word}: {name_error(error)}") from error
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
    expect(Path(module.__file__) == path, f"{word}: {module.__file__} has this name; rename one")
    recipe = config.__mro__[-2]  # ppo.Recipe. The last class of all is `object`.
    subclasses = set()
    for _, member in inspect.getmembers(module, inspect.isclass):
        # The module may also have classes that it has imported.
        if issubclass(member, recipe) and member.__module__ == module.__name__:
            subclasses.add(member)
    # If the file has a class and a subclass of it, the subclass is the variant.
    bases = {base for member in subclasses for base in member.__mro__[1:]}
    found = [member for member in subclasses if member not in bases]
    fault = f"{word} must have one subclass of {recipe.__name__}"
    expect(found, f"{fault}, and has none")
    expect(len(found) == 1, f"{fault}, and has {sorted(x.__name__ for x in found)}")
    # The variant, and the classes that it is built on.
    for variant in set(found[0].__mro__) - set(config.__mro__):
        check_members(variant, config)
    return found[0]


def find_texts(classes) -> dict[str, str]:
    """{name: text} of the files of these classes, and of other files that they import.

    The file of a class has the name NAME. Another file of the package has the name variants.NAME.
    """
    texts = {}
    for variant in classes:
        texts[variant.__module__.removeprefix("variants.")] = read_module(variant.__module__)
    # The import of the classes has imported the other files.
    for module in sys.modules:
        is_imported = module.startswith("variants.")
        if is_imported and module.removeprefix("variants.") not in texts:
            texts[module] = read_module(module)
    return texts


def read_module(name) -> str:
    return Path(sys.modules[name].__file__).read_text(encoding="utf-8")


# ---- the order -----------------------------------------------------------------------------------


def put_in_order(variants: list[type], config: type) -> tuple[list[type], str]:
    """Returns the variants with all classes that they are built on, in the order of the command
    line, and "". If this order cannot work, returns [] and why.

    It cannot work if a method of a later class replaces that of an earlier class without a call of
    super(). Only a class that is built on the earlier class may do so.
    """
    try:
        # The class is not used. Python computes the order of all its bases, the last variant first.
        order = type("Config", (*reversed(variants), config), {}).__mro__[1:]
    except TypeError:
        return [], "a variant must come after those that it is built on"
    classes = [x for x in reversed(order) if x not in config.__mro__]
    for early, late in combinations(classes, 2):
        if issubclass(late, early):
            continue
        for name in own_methods(early) & own_methods(late):
            if not calls_super(vars(late)[name]):
                return [], f"{early.__name__}.{name} is lost: {late.__name__}.{name} has no super()"
    return classes, ""


def own_methods(variant: type) -> set[str]:
    return {name for name, x in vars(variant).items() if inspect.isfunction(x) and name[0] != "_"}


def calls_super(method) -> bool:
    """Does a method call super()? Python gives the variable `__class__` to such a method."""
    return "__class__" in inspect.unwrap(method).__code__.co_freevars


def suggest_order(words, variants, config) -> str:
    """What to do if the order of the variants cannot work: another order, if there is one."""
    # Eight variants have 40,320 orders, which would take too long.
    for order in islice(permutations(variants), 5000):
        classes, _ = put_in_order(order, config)
        if classes:
            return " ".join(["use --variant", *(words[variants.index(x)] for x in order)])
    return "leave one of them out"


# ---- flags, methods, estimators ------------------------------------------------------------------


def check_members(variant: type, config: type):
    """Refuses a flag or a method of a variant that the run would not use."""
    core = typing.get_type_hints(config)  # {flag: type}
    flags = get_annotations(variant)
    for name in flags:
        where = f"{variant.__name__}.{name}"
        field = vars(variant).get("__dataclass_fields__", {}).get(name)
        advice = f'write @dataclass, `{name}: TYPE = flag(DEFAULT, "HELP")`; helpers have no type'
        expect(field and field.metadata.get("help"), f"{where} is no flag yet: {advice}")
        # A name of the core may be a flag with a new default, which keeps its type.
        is_new = not hasattr(config, name)
        has_same_type = typing.get_type_hints(variant)[name] == core.get(name)
        fault = f"{where} must have another name, or the type of the core's --{name}"
        expect(is_new or has_same_type, fault)
    methods = dict(inspect.getmembers(config, inspect.isfunction))
    for name in [x for x in vars(variant) if x[0] != "_" and x not in (*flags, "estimators")]:
        where = f"{variant.__name__}.{name}"
        if name not in methods:
            advice = similar(name, [*methods, *core]) or "its method"
            if name in core:
                advice = f"`{name}: TYPE = flag(DEFAULT, 'HELP')`"
            fault = "is no method of the recipe, and no flag with a type"
            advice = f"write {advice}, or begin the name of a helper with _"
            raise UserError(f"--variant {where} {fault}; {advice}")
        wanted = list(inspect.signature(methods[name]).parameters)
        found = []
        if name in own_methods(variant):
            found = list(inspect.signature(vars(variant)[name]).parameters)
        expect(found == wanted, f"{where} must be a method with ({', '.join(wanted)})")


def check_shared_names(classes, config):
    """Refuses two classes that both have a flag or a helper, unless one is built on the other."""
    for one, two in combinations(classes, 2):
        if issubclass(two, one):
            continue
        for name in sorted(own_names(one) & own_names(two)):
            # Both may give a flag of the core the same new default.
            is_same = hasattr(config, name) and getattr(one, name) == getattr(two, name)
            fault = f"{one.__name__} and {two.__name__} both have {name}"
            expect(is_same, f"{fault}; rename one, or leave one out")


def own_names(variant: type) -> set[str]:
    """The names that no other variant may have, too: of the class, of its flags and helpers."""
    helpers = [name for name in vars(variant) if name[0] == "_" and name[:2] != "__"]
    return {variant.__name__, *get_annotations(variant), *helpers}


def find_flags(classes) -> list:
    """(name, type, field) of the flags of all classes, with the default of the last class.

    Python alone would give some flags another default. Say A gives --lambd the default 0.95, and B
    adds a flag. Then the dataclass B also has a field lambd, with the default 1.0 of the recipe,
    and with B before A in the bases this field would win.
    """
    flags = {}
    for variant in classes:
        for name in get_annotations(variant):
            type_ = typing.get_type_hints(variant)[name]
            flags[name] = (name, type_, variant.__dataclass_fields__[name])
    return list(flags.values())


def join_estimators(variants, config) -> dict:
    """The estimators of the core and of all variants."""
    estimators = dict(config.estimators)
    for variant in variants:
        for name, entry in variant.estimators.items():
            # A variant also has the estimators of the core.
            is_known = estimators.get(name) is entry
            is_new = name not in estimators and hasattr(entry, "needs_critic")
            expect(is_known or is_new, f"{name} is no new ppo.Estimator")
            estimators[name] = entry
    return estimators


# ---- the texts of variants in a run folder -------------------------------------------------------


def write_variants(cfg, folder):
    """Writes the texts of the variants into a folder. kept_files finds them there."""
    folder.mkdir(exist_ok=True)
    for name, text in cfg.variant_texts.items():
        file = name.removeprefix("variants.")
        (folder / f"{file}.py").write_text(text, encoding="utf-8")


def kept_files(run_dir, hashes) -> list[str]:
    """The words of --variant that give a run its variants again: the files in its folder.

    hashes: cfg.variant_hashes of that run. A name with a dot is no variant, but a file that one of
    the variants imports.
    """
    return [f"{run_dir}/variants/{name}.py" for name, _ in hashes if "." not in name]
