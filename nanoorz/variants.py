"""Variants: subclasses of ppo.Recipe in files of their own, as in `--variant kl_loss my_idea.py`.

A run with variants has a config class of its own, which `extend` makes. This class inherits from
the class of each variant and from train.Config. If two variants have the same method, the method of
the later variant is called, and its `super()` calls the method of the earlier one.

In this file a *word* is what the user has written behind --variant. A *variant* is the class in the
file of a word. A variant may be built on another class, in a file that it imports.
"""

import argparse
import dataclasses
import difflib
import importlib
import inspect
import re
import sys
import types
import typing
from inspect import get_annotations
from itertools import combinations, islice, permutations
from pathlib import Path
from unittest import mock

from nanoorz.flags import VARIANTS
from nanoorz.ranks import UserError, name_error


def take_variants(argv) -> tuple[list[str], list[str]]:
    """Returns the words of all --variant, and the rest of the command line. `none` drops the words
    before it. Raises UserError."""
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


def extend(config: type, words: list[str]) -> type:
    """Makes a class like `config` with the flags and methods of these variants. Raises UserError.

    config: train.Config. words: names of files in variants/, or paths that end in .py.
    """
    variants = load(words, config)
    classes, fault = put_in_order(variants, config)
    if fault:
        advice = suggest_order(words, variants, config)
        require(False, f"{' '.join(words)}: {fault}; {advice}")
    check_shared_names(classes, config)
    members = {
        "variant_texts": find_texts(classes),
        "estimators": join_estimators(variants, config),
    }
    # With these bases, Python calls the methods of the last variant first.
    bases = (*reversed(variants), config)
    return dataclasses.make_dataclass("Config", find_flags(classes), bases=bases, namespace=members)


def require(holds, message):
    if not holds:
        raise UserError(f"--variant {message}")


def near(word, known) -> str:
    """The names that are spelled almost like `word`, or nothing."""
    return " or ".join(difflib.get_close_matches(word, known))


# ---- the files -----------------------------------------------------------------------------------


def load(words: list[str], config: type) -> list[type]:
    """Imports the file of each word as the module variants.NAME. Returns the class of each."""
    paths = {}
    for word in words:
        path = Path(word) if word.endswith(".py") else VARIANTS / f"{word}.py"
        if not path.is_file():
            known = [*(x.stem for x in VARIANTS.glob("*.py")), *map(str, Path().glob("*.py"))]
            advice = f"choose {near(word, known) or 'a file of variants/'}, or give a path"
            raise UserError(f"--variant {word}: there is no file {path}; {advice}")
        require(path.stem not in paths, f"{word}: a variant called {path.stem} is there already")
        paths[path.stem] = path.resolve()
    # An earlier call may have imported other files under these names.
    for name in [x for x in sys.modules if x.startswith("variants.")]:
        del sys.modules[name]
    # A variant may import another one: `from variants.log_kl import LogKL`. Python looks for the
    # file in the folders of the words, and then in variants/.
    package = sys.modules["variants"] = types.ModuleType("variants")
    package.__path__ = [*dict.fromkeys(str(path.parent) for path in paths.values()), str(VARIANTS)]
    importlib.invalidate_caches()
    return [load_class(word, path, config) for word, path in zip(words, paths.values())]


def load_class(word, path, config) -> type:
    """Imports the file of a word, and returns its variant."""
    try:
        # Bytecode on the disk has its time in seconds. So it would hide an edit within a second.
        with mock.patch.object(sys, "dont_write_bytecode", True):
            module = importlib.import_module(f"variants.{path.stem}")
    # A variant is any program. It may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(f"--variant {word}: {name_error(error)}") from error
    require(Path(module.__file__) == path, f"{word}: {module.__file__} has this name; rename one")
    recipe = config.__mro__[-2]  # ppo.Recipe: the last class is `object`
    subclasses = set()
    for _, member in inspect.getmembers(module, inspect.isclass):
        # Other classes of the module are imported ones.
        if issubclass(member, recipe) and member.__module__ == module.__name__:
            subclasses.add(member)
    # A file may have a class and a subclass of it. The subclass is the variant.
    bases = {base for member in subclasses for base in member.__mro__[1:]}
    found = [member for member in subclasses if member not in bases]
    fault = f"{word} must have one subclass of {recipe.__name__}"
    require(found, f"{fault}; up to commit {LAST_OF_FUNCTIONS} variants were files of functions")
    require(len(found) == 1, f"{fault}, and has {sorted(x.__name__ for x in found)}")
    for variant in set(found[0].__mro__) - set(config.__mro__):
        check_members(variant, config)
    return found[0]


def find_texts(classes) -> dict[str, str]:
    """{name: text} of the files of these classes, and of the files in variants/ that they import.

    A variant has the name of its file. Another file has the name variants.NAME.
    """
    own = [variant.__module__ for variant in classes]
    texts = {}
    for module in dict.fromkeys([*own, *(x for x in sys.modules if x.startswith("variants."))]):
        text = Path(sys.modules[module].__file__).read_text(encoding="utf-8")
        name = module.removeprefix("variants.") if module in own else module
        texts[name] = text
    return texts


# ---- the order -----------------------------------------------------------------------------------


def put_in_order(variants: list[type], config: type) -> tuple[list[type], str]:
    """Returns the variants with all classes that they are built on, the first on the command line
    first. If the order cannot work, returns [] and why."""
    try:
        order = type("Config", (*reversed(variants), config), {}).__mro__[1:]
    except TypeError:
        return [], "a variant must come after those that it is built on"
    classes = [x for x in reversed(order) if x not in config.__mro__]
    for early, late in combinations(classes, 2):
        # A class that is built on `early` may replace its methods.
        shared = set() if issubclass(late, early) else own_methods(early) & own_methods(late)
        for name in shared:
            if not calls_super(vars(late)[name]):
                return [], f"{early.__name__}.{name} is lost: {late.__name__}.{name} has no super()"
    return classes, ""


def own_methods(variant: type) -> set[str]:
    return {name for name, x in vars(variant).items() if inspect.isfunction(x) and name[0] != "_"}


def calls_super(method) -> bool:
    # Python gives the variable `__class__` to each function whose text has `super()`.
    return "__class__" in inspect.unwrap(method).__code__.co_freevars


def suggest_order(words, variants, config) -> str:
    """What to do if the order of the variants cannot work: another order, if there is one."""
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
        require(field and field.metadata.get("help"), f"{where} is no flag yet: {advice}")
        has_same_type = typing.get_type_hints(variant)[name] == core.get(name)
        fault = f"{where} must have another name, or the type of the core's --{name}"
        require(has_same_type or not hasattr(config, name), fault)
    methods = dict(inspect.getmembers(config, inspect.isfunction))
    for name in [x for x in vars(variant) if x[0] != "_" and x not in (*flags, "estimators")]:
        where = f"{variant.__name__}.{name}"
        if name not in methods:
            flag = f"`{name}: TYPE = flag(DEFAULT, 'HELP')`" if name in core else ""
            advice = f"write {flag or near(name, [*methods, *core]) or 'its method'}, or begin the"
            fault = "is no method of the recipe, and no flag with a type"
            raise UserError(f"--variant {where} {fault}; {advice} name of a helper with _")
        wanted = list(inspect.signature(methods[name]).parameters)
        found = []
        if name in own_methods(variant):
            found = list(inspect.signature(vars(variant)[name]).parameters)
        require(found == wanted, f"{where} must be a method with ({', '.join(wanted)})")


def check_shared_names(classes, config):
    """Refuses two classes that both have a flag or a helper, unless one is built on the other."""
    for one, two in combinations(classes, 2):
        shared = set() if issubclass(two, one) else own_names(one) & own_names(two)
        for name in sorted(shared):
            # Both may give a flag of the core the same new default.
            is_same = hasattr(config, name) and getattr(one, name) == getattr(two, name)
            fault = f"{one.__name__} and {two.__name__} both have {name}"
            require(is_same, f"{fault}; rename one, or leave one out")


def own_names(variant: type) -> set[str]:
    """The names of a class that no other variant may have: of itself, its flags and its helpers."""
    helpers = [name for name in vars(variant) if name[0] == "_" and name[:2] != "__"]
    return {variant.__name__, *get_annotations(variant), *helpers}


def find_flags(classes) -> list:
    """(name, type, field) of the flags of all classes, with the default of the last class.

    A dataclass also has fields for the flags that it inherits, with the defaults of its own bases.
    Without this list such a field of a later class would hide the new default of an earlier class.
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
            is_new = estimators.setdefault(name, entry) is entry
            require(is_new and hasattr(entry, "needs_critic"), f"{name} is no new ppo.Estimator")
    return estimators


# ---- the texts of variants in a run folder -------------------------------------------------------

# Up to this commit a variant was a file of functions. Since then it is a class.
LAST_OF_FUNCTIONS = "229d200"
# Up to this commit the folder nanoorz/ was called lib/.
LAST_OF_LIB = "85ba2b3"


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


def explain_old_run(run_dir, hashes) -> str:
    """Why this version cannot go on with a run, if the texts of its variants are too old, or "".

    run_dir, hashes: see kept_files.
    """
    files = [Path(file) for file in kept_files(run_dir, hashes)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    if not all(re.search(r"^class \w+\(", text, re.MULTILINE) for text in texts):
        fault = "is a file of functions, and variants are classes now"
        last = LAST_OF_FUNCTIONS
    elif any(re.search(r"^(from|import) lib\b", text, re.MULTILINE) for text in texts):
        fault = "imports lib, which is called nanoorz now"
        last = LAST_OF_LIB
    else:
        return ""
    return (
        f"has a variant that {fault}; the last commit that can go on with it is {last}; begin "
        "another run with its model, which `python tools/convert.py export` writes"
    )
