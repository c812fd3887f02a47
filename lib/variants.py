"""Variants: files that change functions of the stages, as in `--variant kl_loss my_idea.py`.

A function of a variant takes the place of the stage's function of the same name, and gets that
function as its first argument. A variant that calls this argument names it `original`: it wraps the
stage's function. A variant that does not call it names it `_original`: it replaces the stage's
function, and must come before the variants that wrap this function. In this file a stage is any
module whose functions a variant can wrap (train.modules_to_wrap). CONTRIBUTING.md is the manual.

Only a run with --variant loads this file.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import numbers
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.advice import VARIANTS, flag_comments
from lib.common import UserError, hash64, one_line


@dataclass
class Hook:
    """A function of a variant."""

    variant: str
    function: Callable
    calls: int = 0

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def is_replacement(self) -> bool:
        return next(iter(inspect.signature(self.function).parameters)) == "_original"


class Variants:
    """The variants of a run, in the order of --variant."""

    def __init__(self, words: list[str]):
        """words: names of files in variants/, or paths that end in .py. Raises UserError."""
        self.words = {}  # name of a variant: how it was given
        self.texts = {}  # name of a variant: its text
        self.modules = {}  # name of a variant: its module
        self.hooks = []
        self.undo = []  # functions that put the stages' own functions back
        self.has_told = False  # has tell_unreached said its line?
        self.named = {Path(word).stem for word in words}  # the names that the user has given
        for word in words:
            self.read(word)
        self.check_order()
        self.hashes = [[name, f"{hash64(text):016x}"] for name, text in self.texts.items()]

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, word):
        path = Path(word) if word.endswith(".py") else VARIANTS / f"{word}.py"
        name = path.stem
        require_variant(
            name not in self.modules, f"{word}: a variant called {name} is there already"
        )
        require_variant(path.is_file(), f"{word}: there is no file {path}{other_names(word)}")
        try:
            text = path.read_text(encoding="utf-8")
            module = run_file(f"variant_{name}", path, text)
        # A variant is any program. It may raise anything, or call sys.exit.
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            # The text of a SyntaxError has the line.
            if not isinstance(error, SyntaxError):
                why += f" (line {traceback.extract_tb(error.__traceback__)[-1].lineno})"
            raise UserError(f"--variant {word}: {why}") from error
        # First read the variants that this one needs, unless the user has named them.
        for early in needs(module):
            is_known = early in self.named or early in self.modules
            if not is_known and (VARIANTS / f"{early}.py").is_file():
                self.read(early)
        self.words[name] = word
        self.texts[name] = text
        self.modules[name] = module
        for public in public_names(text):
            value = getattr(module, public, None)
            if public in KINDS:
                kind, example = KINDS[public]
                require_variant(isinstance(value, kind), f"{word}: {public} must be {example}")
            else:
                self.hooks.append(Hook(name, check_hook(word, text, public, value)))
        flags = getattr(module, "Flags", None)
        require_variant(
            not flags or dataclasses.is_dataclass(flags), f"{word}: put @dataclass over Flags"
        )
        typed = [field.name for field in dataclasses.fields(flags)] if flags else []
        for key in vars(flags) if flags else ():
            is_right = key.startswith("_") or key in typed
            require_variant(
                is_right, f"{word}: Flags: write {key} with its type: `{key}: float = 1.0`"
            )

    def check_order(self):
        """Raises UserError if a variant would undo an earlier one, or needs one before it."""
        rules = self.order_rules()
        given = list(self.modules)
        # Find an order that obeys the rules, for the message. If no variant is free, the rules form
        # a circle.
        order = []
        while len(order) < len(given):
            waiting = {late for early, late in rules if early not in order}
            free = [name for name in given if name not in order and name not in waiting]
            require_variant(free, f"{' '.join(self.words.values())}: {'; '.join(rules.values())}")
            order.append(free[0])
        for early, late in rules:
            require_variant(
                given.index(early) < given.index(late),
                f"{' '.join(self.words.values())}: {rules[early, late]}; use --variant "
                f"{' '.join(self.words[name] for name in order)}",
            )

    def order_rules(self) -> dict[tuple[str, str], str]:
        """{(early, late): why the one variant must come before the other}."""
        rules = {}
        for late, module in self.modules.items():
            for early in needs(module):
                require_variant(
                    early in self.modules, f"{self.words[late]} needs {early}; name it before"
                )
                rules[early, late] = f"{late} needs {early} before it"
        for hook, other in itertools.permutations(self.hooks, 2):
            if hook.name == other.name and hook.is_replacement:
                pair = (hook.variant, other.variant)
                both = f"{self.words[pair[0]]} and {self.words[pair[1]]} both replace {hook.name}"
                require_variant(not other.is_replacement, f"{both}: leave one of them out")
                rules[pair] = (
                    f"{pair[0]} replaces {hook.name}, and would undo {pair[1]} if it came later"
                )
        return rules

    def extend(self, config: type) -> type:
        """Makes a class like `config` that has the flags of the variants too. Raises UserError.

        The attribute `variants` of the class is this object.
        """
        core = {field.name: field for field in dataclasses.fields(config)}
        owner = {}  # flag: the variant that added it, or gave it a new default
        default = {}
        bases = (config,)
        for name, module in self.modules.items():
            if not hasattr(module, "Flags"):
                continue
            texts = flag_comments(module.Flags)
            for field in dataclasses.fields(module.Flags):
                flag = f"{self.words[name]}: --{field.name}"
                # Without a default, default and default_factory are both MISSING.
                no_default = field.default is field.default_factory
                require_variant(not no_default, f"{flag} has no default")
                text = "write a comment behind it that says what it does"
                require_variant(field.name in texts, f"{flag} has no advice: {text}")
                known = core.get(field.name)
                is_like = not known or known.type == field.type
                require_variant(is_like, f"{flag} must have the type that it has in train.py")
                before = owner.get(field.name)
                value = field.default
                if value is dataclasses.MISSING:
                    value = field.default_factory()
                # Two variants may set the default of one flag of train.py if the value is the same,
                # or if one variant needs the other.
                is_same = known and default.get(field.name) == value
                require_variant(
                    before in (None, *needs(module)) or is_same,
                    f"{flag} is a flag of {before} too; leave one of the two variants out",
                )
                owner[field.name] = name
                default[field.name] = value
            bases = (module.Flags, *bases)
        self.new_defaults = {flag: default[flag] for flag in default if flag in core}
        self.added = {flag: default[flag] for flag in default if flag not in core}
        members = {"__module__": __name__, "variants": self}
        return dataclass(type("Config", bases, members))

    # ---- installing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self, stages: list):
        """Inside `with`, the variants' functions are in the place of the stages' functions.

        Raises UserError if a function has other arguments than the stage's function.
        """
        try:
            self.wrap(stages)
            yield self
        finally:
            while self.undo:
                self.undo.pop()()

    def wrap(self, stages: list):
        """Wraps functions of these modules. Raises UserError."""
        for stage in stages:
            for name, module in self.modules.items():
                self.refuse_direct_imports(name, module, stage)
                if hasattr(stage, "ESTIMATORS"):
                    self.add_estimators(name, module, stage)
            for name in sorted({hook.name for hook in self.hooks} & set(functions_of(stage))):
                function = getattr(stage, name)
                self.replace_everywhere(stage, function, self.wrapped_function(name, function))

    def replace_everywhere(self, stage, function, wrapped):
        """Puts `wrapped` in the place of `function`, in the module and in the module's tables."""
        self.set_with_undo(vars(stage), function.__name__, wrapped)
        for table in [table for table in vars(stage).values() if isinstance(table, dict)]:
            for key, value in table.items():
                if value is function:
                    self.set_with_undo(table, key, wrapped)
                elif getattr(value, "function", None) is function:
                    # An entry of ESTIMATORS.
                    self.set_with_undo(table, key, dataclasses.replace(value, function=wrapped))

    def wrapped_function(self, name, function):
        """The function of a stage with the variants' functions around it."""
        wrappers = [hook for hook in self.hooks if hook.name == name]
        wrapped = function
        for hook in wrappers:
            require_variant(
                arguments_of(hook.function)[1:] == arguments_of(function),
                f"{self.words[hook.variant]}: after its first argument {name} needs these "
                f"arguments and defaults: {inspect.signature(function)}",
            )
            wrapped = counted(hook, wrapped)
        if name in CHECKS:
            wrapped = checked(wrapped, CHECKS[name], self.describe_chain(name))
        return wrapped

    def refuse_direct_imports(self, name, module, stage):
        """Refuses `from ppo import gae` in a variant: other variants could not wrap that name."""
        for key, value in vars(module).items():
            is_of_stage = inspect.isfunction(value) and value.__module__ == stage.__name__
            require_variant(
                not is_of_stage,
                f"{self.words[name]}: import {stage.__name__} and call {stage.__name__}.{key}, so "
                "that other variants can wrap it",
            )

    def add_estimators(self, name, module, stage):
        for key, entry in getattr(module, "ESTIMATORS", {}).items():
            where = f"{self.words[name]}: the estimator {key}"
            require_variant(isinstance(entry, stage.Estimator), f"{where} must be a ppo.Estimator")
            require_variant(
                key not in stage.ESTIMATORS, f"{where} is there already; choose another name"
            )
            self.set_with_undo(stage.ESTIMATORS, key, entry)
            # The hooks come around this check, so none of them is blamed for the estimator.
            check = functools.partial(wrong_numbers, estimator=key)
            function = checked(stage.raw_advantages, check, f"the estimator {key}")
            self.set_with_undo(vars(stage), "raw_advantages", function)

    def set_with_undo(self, table: dict, name, value):
        if name in table:
            self.undo.append(functools.partial(table.__setitem__, name, table[name]))
        else:
            self.undo.append(functools.partial(table.__delitem__, name))
        table[name] = value

    def wrap_task(self, task, stages: list):
        """Wraps the task's functions. Raises UserError for a name that no module has."""
        in_stages = {name for stage in stages for name in functions_of(stage)}
        in_task = set(functions_of(task))
        for hook in self.hooks:
            where = f"{self.words[hook.variant]}: {hook.name}"
            require_variant(
                hook.name not in BEFORE_FLAGS, f"{where} runs before the variants are installed"
            )
            places = in_stages | in_task
            near = " or ".join(difflib.get_close_matches(hook.name, places)) or "a name of a stage"
            require_variant(
                hook.name in places,
                f"{where} is no function of a stage or of the task; write {near}, or begin a "
                "helper's name with _",
            )
            is_clear = hook.name not in in_stages & in_task
            require_variant(
                is_clear, f"{where} is a function of a stage and of the task; rename the task's"
            )
        self.wrap([task])

    # ---- the run ---------------------------------------------------------------------------------

    @property
    def memory(self) -> dict[str, dict]:
        """The MEMORY of each variant that has one. The variants change it during the run."""
        modules = self.modules.items()
        return {name: module.MEMORY for name, module in modules if hasattr(module, "MEMORY")}

    def restore_memory(self, saved: dict[str, dict]):
        """saved: {name of a variant: its MEMORY in the checkpoint}."""
        for name, memory in self.memory.items():
            memory.update(saved.get(name, {}))

    @property
    def estimators(self) -> list[str]:
        return [
            key for module in self.modules.values() for key in vars(module).get("ESTIMATORS", [])
        ]

    def tell_start(self, run_dir: Path):
        """Prints which variant wraps which function. Copies the texts into the run folder, where
        a resumed run compares them. Rank 0 calls it."""
        for name in dict.fromkeys(hook.name for hook in self.hooks):
            print("variants:", self.describe_chain(name))
        for flag, value in self.new_defaults.items():
            print(f"variants: the default of --{flag} is {value}")
        folder = run_dir / "variants"
        folder.mkdir(exist_ok=True)
        for name, text in self.texts.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")

    def describe_chain(self, name) -> str:
        """A sentence such as "b wraps a wraps paid". The outermost variant comes first."""
        hooks = [hook for hook in reversed(self.hooks) if hook.name == name]
        words = [hook.variant for hook in hooks]
        last = "replaces" if hooks[-1].is_replacement else "wraps"
        return f"{' wraps '.join(words)} {last} {name}"

    def tell_unreached(self, learned: dict):
        """After the first step in which the policy learns, names the hooks that were not called."""
        if not learned.get("policy_micro_batches") or self.has_told:
            return
        self.has_told = True
        missed = [hook for hook in self.hooks if not hook.calls and hook.name not in AFTER_A_STEP]
        names = [f"{hook.variant}.{hook.name}" for hook in missed]
        if names:
            fact = f"not called in the first learning step: {', '.join(names)}"
            why = "another variant may replace their callers, or the run calls them later"
            print(f"WARNING: --variant: {fact}; {why}", file=sys.stderr)


# Functions of train.py that read the flags. They run before the variants are known.
BEFORE_FLAGS = ("run", "parse_flags", "refuse_flag")
# Functions of ckpt.py that a run calls after a step.
AFTER_A_STEP = ("save", "write_engines", "publish", "prune", "export", "write_export")
# The public names that a variant may define beside functions: their type and its description.
KINDS = {
    "Flags": (type, "a dataclass"),
    "ESTIMATORS": (dict, "a dict of ppo.Estimator by name"),
    "NEEDS": ((tuple, list), "a list of names"),
    "MEMORY": (dict, "a dict"),
}


def take_words(argv) -> tuple[list[str], list[str]]:
    """Returns the words of --variant, and the other words. `none` drops the variants before it."""
    words = []
    rest = []
    target = rest
    for word in argv:
        flag, is_joined, value = word.partition("=")
        if flag == "--variant":
            target = words
            if is_joined:
                words.append(value)
        else:
            # The next flag ends the list of --variant.
            target = rest if word.startswith("-") else target
            target.append(word)
    require_variant(
        words, "names nothing; give a file of variants/, a path that ends in .py, or none"
    )
    if "none" in words:
        last = len(words) - words[::-1].index("none")
        words = words[last:]
    return words, rest


def require_variant(holds, message):
    if not holds:
        raise UserError(f"--variant {message}")


def other_names(word) -> str:
    name = word.removesuffix(".py")
    known = sorted(file.stem for file in VARIANTS.glob("*.py"))
    near = difflib.get_close_matches(name, known)
    if word.endswith(".py") and not near:
        return "; give the path of a file"
    if Path(f"{name}.py").is_file():
        near = [f"{name}.py"]
    near = " or ".join(near) or "a file of variants/ without .py"
    return f"; choose {near}, or a path that ends in .py"


def needs(module) -> list[str]:
    return list(getattr(module, "NEEDS", []))


def run_file(name, path, text) -> types.ModuleType:
    """Runs the text of a file as a module. The file is not read again: it could have changed."""
    module = types.ModuleType(name)
    module.__file__ = str(path.resolve())
    # A dataclass looks for its module in sys.modules.
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def public_names(text) -> list[str]:
    """The names that a file defines, without imported names and names that begin with _."""
    names = []
    waiting = [ast.parse(text)]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        # The names inside a lambda or a comprehension are not the file's.
        elif not isinstance(node, (ast.Lambda, ast.comprehension)):
            waiting += ast.iter_child_nodes(node)
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def check_hook(word, text, name, value):
    """Returns the function `value`. Raises UserError if it is no function, or if the name of its
    first argument is wrong."""
    is_plain = inspect.isfunction(value) and value.__name__ == name
    require_variant(
        is_plain and not inspect.iscoroutinefunction(value),
        f"{word}: {name} must be a function made by `def`; begin a helper's name with _",
    )
    first = next(iter(inspect.signature(value).parameters), None)
    require_variant(
        first in ("original", "_original"),
        f"{word}: the first argument of {name} must be original, the function that it wraps; or "
        "_original if it is not called; the name of a helper begins with _",
    )
    body = next(node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == name)
    used = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    right = "original" if first in used else "_original"
    verb = "uses" if first in used else "does not use"
    require_variant(
        first == right, f"{word}: {name} {verb} its first argument; name this argument {right}"
    )
    return value


def counted(hook: Hook, original):
    """The hook around `original`. Counts the calls for tell_unreached."""

    @functools.wraps(original)
    def wrapper(*arguments, **named):
        hook.calls += 1
        return hook.function(original, *arguments, **named)

    return wrapper


def checked(function, check, chain: str):
    """The same function, but a result of a wrong form raises UserError."""

    @functools.wraps(function)
    def wrapper(*arguments, **named):
        result = function(*arguments, **named)
        given = inspect.signature(function).bind(*arguments, **named).arguments
        try:
            fault = check(result, **given)
        except (TypeError, AttributeError):
            fault = f"the result is {result!r:.99}; does the function return what it should?"
        if fault:
            raise UserError(f"--variant: {chain}: {one_line(fault)}")
        return result

    return wrapper


def arguments_of(function) -> list[tuple]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def functions_of(module) -> list[str]:
    """The names of the functions that a module itself defines."""
    names = []
    for name, value in vars(module).items():
        # A wrapped function has the stage's name in __module__, because of functools.wraps.
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            names.append(name)
    return names


# ---- the form of what a hook returns: each check returns what is wrong, or None ------------------


def wrong_rewards(result, samples, **_):
    if len(result) != len(samples):
        return f"{len(result)} rewards for {len(samples)} samples"
    for reward in result:
        # Much larger numbers do not fit into float32.
        if not isinstance(reward, numbers.Real) or not abs(reward) < 1e30:
            kind = type(reward).__name__
            return f"a reward is {reward!r:.99} ({kind}), and must be a number below 1e30 in size"


def wrong_samples(result, batch, **_):
    if not set(result) <= set(batch.all_indices()) or len(set(result)) < len(result):
        return f"the result must hold indices of the {len(batch.samples)} samples, each once"


def wrong_tokens(result, batch, **_):
    return wrong_shape(result, (int(batch.response_lengths.sum()),))


def wrong_numbers(result, batch, cfg, advantages=None, estimator=None, **_):
    """estimator: check the results of this estimator alone."""
    if estimator not in (None, cfg.estimator):
        return None
    if fault := wrong_tokens(result, batch):
        return fault
    # With NaN in the inputs the function is not to blame: the critic may have diverged.
    inputs = [*batch.per_token.values(), *([] if advantages is None else [advantages])]
    if not result.isfinite().all() and all(tensor.isfinite().all() for tensor in inputs):
        return "the result has NaN or infinity"


def wrong_losses(result, micro, logprobs, advantages, **_):
    if fault := wrong_shape(result, tuple(micro.mask.shape)):
        return fault
    if logprobs.requires_grad and not result.requires_grad:
        return "the result has no gradient, because it does not depend on logprobs or entropy"
    are_finite = logprobs.isfinite().all() and advantages.isfinite().all()
    if are_finite and not result.isfinite().all():
        return "the result has NaN or infinity"


def wrong_loss(result, **_):
    loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not isinstance(loss, torch.Tensor) or loss.shape or not isinstance(stats, dict):
        return f"the result must be a pair: a sum over tokens and a dict, not {result!r:.99}"


def wrong_shape(result, shape):
    if not isinstance(result, torch.Tensor):
        return f"the result must be a tensor, not {type(result).__name__}: {result!r:.99}"
    if tuple(result.shape) != shape:
        return f"the result must be a tensor of shape {shape}, and is {tuple(result.shape)}"


def wrong_drawn(result, requests, **_):
    asked = [(request.group, request.index) for request in requests]
    found = [(sample.request.group, sample.request.index) for sample in result]
    if found != asked:
        return f"{len(found)} samples for {len(asked)} requests, or in another order"


def wrong_step(result, **_):
    if not result:
        return "no samples"


def wrong_problems(result, cfg, **_):
    if len(result) != cfg.rollout_batch_size:
        return f"{len(result)} problems for --rollout_batch_size {cfg.rollout_batch_size}"


def wrong_order(result, problems, **_):
    if sorted(result) != list(range(len(problems))):
        return f"the result must hold each index of the {len(problems)} problems once"


CHECKS = {
    "paid": wrong_rewards,
    "samples_that_count": wrong_samples,
    "samples_to_learn_from": wrong_samples,
    "raw_advantages": wrong_numbers,
    "critic_targets": wrong_numbers,
    "whiten": wrong_numbers,
    "compute_values": wrong_tokens,
    "compute_logprobs": wrong_tokens,
    "token_loss": wrong_losses,
    "policy_loss": wrong_loss,
    "critic_loss": wrong_loss,
    "draw": wrong_drawn,
    "draw_step": wrong_step,
    "problems_of_step": wrong_problems,
    "episode_order": wrong_order,
}
