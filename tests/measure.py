"""Figures of Python files that re-typesetting cannot change, and the rules of style as functions.

A rule takes a `Source` and returns one line for each place that breaks it: file, line number, what
is wrong and what to do. An empty list means that the rule holds. Files are read with `ast` and
`tokenize` and never imported.

    python tests/measure.py    the figures of every file, and the tokens that a run loads

Tokens leave out comments, docstrings and layout. The size of a statement is the number of its AST
nodes without those of statements nested in it.
"""

import ast
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
STAGES = ("train.py", "rollout.py", "reward.py", "ppo.py", "ckpt.py")
FOLDERS = ("lib", "tools", "tasks")  # with the stages: the product
NOT_OF_A_RUN = "lib/levers.py"  # it is loaded only when a lever is pulled

LINE_LENGTH = 100
STATEMENT_P90 = 15
STATEMENT_MAX = 30
FUNCTION_LINES = 40
MAIN_LINES = 90
NESTING = 3
MAIN_NESTING = 4
PARAMETERS = 7
TRAILING_COMMENT = 40  # characters after the hash

# of each kind: how many in 100 lines of code, and how many in a file that has fewer lines
EXPRESSION_LIMITS = {
    "conditional expressions": (ast.IfExp, 2.5, 2),
    "lambdas": (ast.Lambda, 0.5, 1),
    "walruses": (ast.NamedExpr, 0.5, 1),
}

# what each part of the house may import; nothing may import tools or ablations
MAY_IMPORT = {
    "tools": {"train", "stages", "lib"},
    "train": {"stages", "lib"},
    "stages": {"lib"},
    "lib": {"lib"},
    "tasks": {"lib", "tasks"},
}

# the files of lib that a stage takes along when it is copied; train.py is not copied
COPIED_WITH = {
    "rollout.py": {"lib/common.py"},
    "reward.py": {"lib/common.py", "lib/equal.py"},
    "ppo.py": {"lib/common.py"},
    "ckpt.py": {"lib/common.py"},
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)
CLAUSES = (ast.ExceptHandler, ast.match_case)
SEQUENCES = (ast.Tuple, ast.List)
LITERALS = (ast.Dict, ast.List, ast.Tuple, ast.Set)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.Return)
SYMBOLS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)

AXIS = r"[\w.+*/-]+(?: (?:[-+*/] )?[\w.]+)?"
SHAPE = rf"\({AXIS}(?:, {AXIS})*,?\)"  # (R, L)
SHAPES = re.compile(rf"{SHAPE}(?:, {SHAPE})*")
FORMATTER_SWITCH = re.compile(r"\b(?:fmt|yapf): ?(?:off|on|skip|disable)")
PREDICATE = re.compile(
    r"is_?\w*|are_\w+|has_\w+|can_\w+|same_\w+|hasattr|callable|any|all|bool"
    r"|exists|startswith|endswith"
)


class Comment(NamedTuple):
    line: int
    text: str  # without the hash
    trailing: bool  # behind code


class Import(NamedTuple):
    line: int
    # dotted: a module, and what may be modules in it
    names: tuple[str, ...]
    in_function: bool


class Source:
    """A Python file: its name relative to the root, syntax tree, comments and number of tokens."""

    def __init__(self, name: str, text: str):
        self.name = name
        self.lines = text.split("\n")
        self.tree = ast.parse(text)
        self.nodes = sorted(ast.walk(self.tree), key=line_of)
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        self.docstring_lines = docstring_lines(self.nodes)
        self.comments = []
        self.tokens = 0
        self.code_lines = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line, column = token.start
            if token.type == tokenize.COMMENT:
                is_trailing = self.lines[line - 1][:column].strip() != ""
                self.comments.append(Comment(line, token.string.lstrip("#").strip(), is_trailing))
            elif token.type not in LAYOUT and line not in self.docstring_lines:
                self.tokens += 1
                self.code_lines.update(range(line, token.end[0] + 1))

    def at(self, line: int, message: str) -> str:
        return f"{self.name}:{line}: {message}"


@cache
def read(name: str) -> Source:
    return Source(name, (ROOT / name).read_text())


def product_files() -> list[str]:
    """All Python files of the root, `lib/`, `tools/` and `tasks/`, relative to the root."""
    paths = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def line_of(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def docstring_lines(nodes) -> set[int]:
    lines = set()
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


# ---- statements and expressions ------------------------------------------------------------------


def long_lines(source: Source) -> list[str]:
    found = []
    for number, line in enumerate(source.lines, start=1):
        if len(line) > LINE_LENGTH:
            found.append(source.at(number, f"{len(line)} columns: break it at {LINE_LENGTH}"))
    return found


def formatter_switches(source: Source) -> list[str]:
    return [
        source.at(comment.line, f"`# {comment.text}` hides a line from the formatter: remove it")
        for comment in source.comments
        if FORMATTER_SWITCH.search(comment.text)
    ]


def statement_size(statement: ast.stmt) -> int:
    """AST nodes of a statement, without the statements nested in it."""
    size = 0
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        is_nested = isinstance(node, (ast.stmt, *CLAUSES)) and node is not statement
        if not is_nested and not isinstance(node, SYMBOLS):
            size += 1
            waiting += ast.iter_child_nodes(node)
    return size


def is_table(statement: ast.stmt) -> bool:
    """Is it the assignment of a literal, which one reads as a table and not as a statement?"""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    return isinstance(statement.value, (*LITERALS, ast.Constant))


def statement_sizes(source: Source) -> list[tuple[int, int]]:
    """Size and line of all statements but imports, docstrings and tables, in ascending order."""
    sizes = []
    for node in source.nodes:
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if node.lineno not in source.docstring_lines and not is_table(node):
            sizes.append((statement_size(node), node.lineno))
    return sorted(sizes)


def position_90(sizes: list) -> int:
    """Where in a sorted list nine in ten come before."""
    return int(0.9 * (len(sizes) - 1))


def dense_statements(source: Source) -> list[str]:
    sizes = statement_sizes(source)
    found = [
        source.at(line, f"a statement of {size} nodes: split it, at most {STATEMENT_MAX}")
        for size, line in sizes
        if size > STATEMENT_MAX
    ]
    position = position_90(sizes)
    if sizes and sizes[position][0] > STATEMENT_P90:
        dense = [(line, size) for size, line in reversed(sizes) if size > STATEMENT_P90]
        places = ", ".join(f"{line} ({size})" for line, size in dense)
        excess = len(dense) - len(sizes[position + 1 :])
        message = f"a tenth of the statements has more than {STATEMENT_P90} nodes: split"
        message += f" {excess} of the lines {places}"
        found.append(source.at(dense[0][0], message))
    return found


def parallel_assignments(source: Source) -> list[str]:
    """`a, b = 1, 2`. Not `a, b = b, a + b`, which needs the old values, and not `a, b = pair`."""
    found = []
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, SEQUENCES):
            continue
        target = node.targets[0]
        if isinstance(target, SEQUENCES) and plain_names(target).isdisjoint(
            plain_names(node.value)
        ):
            found.append(source.at(node.lineno, "a parallel assignment: one line for each name"))
    return found


def plain_names(sequence) -> set[str]:
    return {element.id for element in sequence.elts if isinstance(element, ast.Name)}


def crowded_expressions(source: Source) -> list[str]:
    """Conditional expressions, lambdas and walruses beyond their share of the lines of code."""
    found = []
    hundreds = len(source.code_lines) / 100
    for kind, (node_type, per_hundred, in_small_file) in EXPRESSION_LIMITS.items():
        lines = sorted(node.lineno for node in source.nodes if isinstance(node, node_type))
        allowed = in_small_file
        if hundreds >= 1:
            allowed = int(per_hundred * hundreds)
        if len(lines) > allowed:
            places = ", ".join(map(str, lines))
            message = f"{len(lines)} {kind}, at most {allowed} here: rewrite some of lines {places}"
            found.append(source.at(lines[0], message))
    return found


# ---- tricks --------------------------------------------------------------------------------------


def tricks(source: Source) -> list[str]:
    """Expressions that hide an `if` statement. What is caught:

    `text * (a > b)`, also with `not`, `and`, `or`, `bool(...)` or True for the comparison;
    `for x in xs if flag else ()`, in a loop or in a comprehension;
    `flag and call()` or `a or b` as a whole statement;
    `x = flag and call()`, and the same behind `return`, `:=` or `+=` and in a tuple there, where
    the last operand is no truth value: a call of something that is not known to answer yes or no,
    a display, a text, a number, a sum. A name at the end may be a truth value: it is left alone;
    `{...}[x]`, `(a, b)[flag]`, `[a, b][flag]` and `{...}.get(x)`.
    """
    predicates = {node.name for node in source.functions if returns_bool(node)}
    truth_returns = set()
    for function in source.functions:
        if returns_bool(function):
            truth_returns.update(
                node for node in ast.walk(function) if isinstance(node, ast.Return)
            )
    found = []
    for node in source.nodes:
        message = trick(node, predicates)
        if message and node not in truth_returns:
            if isinstance(node, ast.comprehension):
                node = node.iter  # a comprehension has no line of its own
            found.append(source.at(node.lineno, message))
    return found


def trick(node: ast.AST, predicates: set[str]) -> str | None:
    match node:
        case ast.BinOp(op=ast.Mult()) if is_condition(node.left) or is_condition(node.right):
            return "a product with a condition: write an `if`, for tensors torch.where"
        case ast.AugAssign(op=ast.Mult()) if is_condition(node.value):
            return "a product with a condition: write an `if`, for tensors torch.where"
        case ast.Expr(value=ast.BoolOp()):
            return "`and` or `or` as a statement: write an `if`"
        case ast.Subscript(value=ast.Dict() | ast.Tuple() | ast.List()):
            return "a literal as a switch: write an `if`, or give the table a name"
        case ast.Call(func=ast.Attribute(value=ast.Dict(), attr="get")):
            return "a literal as a switch: write an `if`, or give the table a name"
    if isinstance(node, LOOPS) and isinstance(node.iter, ast.IfExp):
        return "a loop over one thing or another: write an `if` around it or before it"
    if isinstance(node, ASSIGNMENTS):
        values = [node.value]
        if isinstance(node.value, ast.Tuple):
            values = node.value.elts
        if any(is_and_of_value(value, predicates) for value in values):
            return "`and` for its value: write an `if`"
    return None


def is_condition(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=bool()) | ast.Call(func=ast.Name(id="bool")):
            return True
    return False


def is_and_of_value(node: ast.expr | None, predicates: set[str]) -> bool:
    match node:
        case ast.BoolOp(op=ast.Or()):
            return any(is_and_of_value(operand, predicates) for operand in node.values)
        case ast.BoolOp(op=ast.And()):
            last = node.values[-1]
            return is_and_of_value(last, predicates) or not may_be_truth(last, predicates)
    return False


def may_be_truth(node: ast.expr, predicates: set[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in predicates or PREDICATE.fullmatch(name) is not None
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.NamedExpr():
            return True
        case ast.BoolOp():
            return all(may_be_truth(operand, predicates) for operand in node.values)
    return is_condition(node)


def returns_bool(function) -> bool:
    return function.returns is not None and ast.unparse(function.returns).startswith("bool")


# ---- functions and comments ----------------------------------------------------------------------


def long_functions(source: Source) -> list[str]:
    found = []
    for function in source.functions:
        limit = MAIN_LINES if function.name == "main" else FUNCTION_LINES
        length = function_lines(function)
        if length > limit:
            message = f"{function.name} has {length} lines: split it, at most {limit}"
            found.append(source.at(function.lineno, message))
    return found


def function_lines(function) -> int:
    return function.end_lineno - function.lineno + 1


def many_parameters(source: Source) -> list[str]:
    found = []
    for function in source.functions:
        number = parameters(function)
        if number > PARAMETERS:
            message = f"{function.name} takes {number} parameters: at most {PARAMETERS}"
            found.append(source.at(function.lineno, f"{message}, put some into one object"))
    return found


def parameters(function) -> int:
    """How many, without `self`, `cls` or `ctx` at the front."""
    names = function.args.posonlyargs + function.args.args
    number = len(names) + len(function.args.kwonlyargs)
    if names and names[0].arg in ("self", "cls", "ctx"):
        number -= 1
    return number


def deep_nesting(source: Source) -> list[str]:
    found = []
    for scope in [source.tree, *source.functions]:
        name = getattr(scope, "name", "the module")
        limit = MAIN_NESTING if name == "main" else NESTING
        depth, line = nesting(scope)
        if depth > limit:
            message = f"{name} nests {depth} deep: leave early or make a function, at most {limit}"
            found.append(source.at(line, message))
    return found


def nesting(scope, depth: int = 0) -> tuple[int, int]:
    """The largest depth of blocks in a scope, functions in it left out, and the line it is at.

    An `elif` is as deep as its `if`; a class starts again at 0.
    """
    deepest = (depth, getattr(scope, "lineno", 1))
    for block, block_depth in blocks(scope, depth):
        for statement in block:
            if isinstance(statement, FUNCTIONS):
                continue
            inner_depth = block_depth
            if isinstance(statement, ast.ClassDef):
                inner_depth = 0
            if isinstance(statement, BLOCKS):
                inner_depth = block_depth + 1
            deepest = max(deepest, nesting(statement, inner_depth))
    return deepest


def blocks(statement, depth: int):
    """The blocks of a statement that is `depth` deep, each with the depth of what is in it."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(statement, field, None)
        if not isinstance(children, list) or not children:
            continue
        if isinstance(children[0], CLAUSES):
            for clause in children:
                yield clause.body, depth
        elif field == "orelse" and is_elif(statement):
            yield children, depth - 1
        else:
            yield children, depth


def is_elif(statement) -> bool:
    branch = statement.orelse
    return isinstance(statement, ast.If) and len(branch) == 1 and isinstance(branch[0], ast.If)


def long_trailing_comments(source: Source) -> list[str]:
    exempt = set()
    if source.name == "train.py":
        for field in config_fields(source):
            exempt.update(range(field.lineno, field.end_lineno + 1))
    found = []
    for comment in source.comments:
        if not comment.trailing or comment.line in exempt or SHAPES.fullmatch(comment.text):
            continue
        if len(comment.text) > TRAILING_COMMENT:
            message = f"a trailing comment of {len(comment.text)} characters, at most"
            message += f" {TRAILING_COMMENT}: write a sentence on its own line above"
            found.append(source.at(comment.line, message))
    return found


# ---- imports -------------------------------------------------------------------------------------


def imports(source: Source) -> list[Import]:
    """All imports, `importlib.import_module` of a literal among them, in the order of lines."""
    in_function = set()
    for function in source.functions:
        in_function.update(ast.walk(function))
    found = []
    for node in source.nodes:
        names = imported_names(node, source)
        if names:
            found.append(Import(node.lineno, names, node in in_function))
    return sorted(found)


def imported_names(node: ast.AST, source: Source) -> tuple[str, ...]:
    match node:
        case ast.Import():
            return tuple(alias.name for alias in node.names)
        case ast.ImportFrom():
            module = node.module or ""
            if node.level > 0:
                folder = Path(source.name).parents[node.level - 1]
                module = ".".join([*folder.parts, *module.split(".")]).strip(".")
            return (module, *(f"{module}.{alias.name}".strip(".") for alias in node.names))
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]
        ):
            return (name,)
    return ()


def file_of(module: str, source: Source, files: set[str]) -> str | None:
    """The file of this repository that a dotted name means: from the root, or beside the source."""
    path = module.replace(".", "/") + ".py"
    beside = (Path(source.name).parent / path).as_posix()
    for candidate in (path, beside):
        if candidate in files:
            return candidate
    return None


def our_imports(source: Source, files: set[str]) -> list[tuple[int, str, bool]]:
    """Line, file and whether in a function, of each import of a file of this repository."""
    found = []
    for line, names, in_function in imports(source):
        targets = {file_of(name, source, files) for name in names} - {None}
        found += [(line, target, in_function) for target in sorted(targets)]
    return found


def import_graph(sources: dict[str, Source]) -> dict[str, set[str]]:
    files = set(sources)
    graph = {}
    for name, source in sources.items():
        graph[name] = {target for _, target, _ in our_imports(source, files)}
    return graph


def loaded_by(starts, graph: dict[str, set[str]]) -> list[str]:
    """The files of `starts` and all that they import, but for what a run leaves out."""
    loaded = set()
    waiting = [name for name in starts if name in graph]
    while waiting:
        name = waiting.pop()
        if name not in loaded and name != NOT_OF_A_RUN:
            loaded.add(name)
            waiting += graph[name]
    return sorted(loaded)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """A circle of imports for each file that one leads back to."""
    found = []
    for start in sorted(graph):
        waiting = [[start]]
        seen = set()
        while waiting:
            path = waiting.pop()
            if start in graph[path[-1]]:
                way = " -> ".join([*path, start])
                found.append(f"{start}:1: a circle of imports, {way}: move what they share down")
                break
            waiting += [[*path, name] for name in sorted(graph[path[-1]] - seen)]
            seen |= graph[path[-1]]
    return found


def part_of_house(file: str) -> str:
    if file == "train.py":
        return "train"
    folder, slash, _ = file.partition("/")
    return folder if slash else "stages"


def upward_imports(source: Source, files: set[str]) -> list[str]:
    """`files` are all Python files of the repository, relative to the root."""
    part = part_of_house(source.name)
    found = []
    for line, target, _ in our_imports(source, files):
        if part_of_house(target) not in MAY_IMPORT[part]:
            allowed = ", ".join(sorted(MAY_IMPORT[part]))
            message = f"imports {target}: {part} may import {allowed} and nothing else of ours"
            found.append(source.at(line, message))
    return found


def entangled_imports(source: Source, files: set[str]) -> list[str]:
    """Files of `lib/` that a stage needs besides those that are copied with it.

    Only `ckpt.py` may import others inside its functions, because only some runs reshard.
    """
    allowed = COPIED_WITH[source.name]
    found = []
    for line, target, in_function in our_imports(source, files):
        is_optional = in_function and source.name == "ckpt.py"
        if target.startswith("lib/") and target not in allowed and not is_optional:
            message = f"imports {target}: a stage is copied with {', '.join(sorted(allowed))} alone"
            found.append(source.at(line, message))
    return found


def foreign_imports(source: Source, files: set[str], top_only: bool = False) -> list[str]:
    """Imports besides this repository, the standard library, torch and numpy."""
    found = []
    for line, names, in_function in imports(source):
        package = names[0].partition(".")[0]
        is_ours = any(file_of(name, source, files) for name in names)
        is_known = package in sys.stdlib_module_names or package in ("torch", "numpy")
        if not is_ours and not is_known and not (top_only and in_function):
            message = f"imports {package}: this file needs torch and numpy only"
            found.append(source.at(line, message))
    return found


# ---- Config and the loop -------------------------------------------------------------------------


def config_fields(source: Source) -> list[ast.AnnAssign]:
    """The annotated fields of class Config and of its bases in the same file."""
    classes = {node.name: node for node in source.nodes if isinstance(node, ast.ClassDef)}
    fields = []
    waiting = ["Config"]
    while waiting:
        node = classes.get(waiting.pop())
        if node is not None:
            fields += [field for field in node.body if isinstance(field, ast.AnnAssign)]
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return fields


def config_reads(source: Source) -> set[str]:
    """The names X of all `cfg.X` and `self.cfg.X` that are read, not assigned."""
    names = set()
    for node in source.nodes:
        match node:
            case ast.Attribute(
                value=ast.Name(id="cfg") | ast.Attribute(attr="cfg"), ctx=ast.Load(), attr=name
            ):
                names.add(name)
    return names


def unread_fields(source: Source, reads: set[str]) -> list[str]:
    return [
        source.at(field.lineno, f"{field.target.id} is never read as cfg.{field.target.id}: delete")
        for field in config_fields(source)
        if field.target.id not in reads
    ]


def fields_without_advice(source: Source) -> list[str]:
    """Fields of Config without a comment behind them or on the line above."""
    comments = {comment.line for comment in source.comments if comment.trailing}
    comments |= {comment.line + 1 for comment in source.comments if not comment.trailing}
    found = []
    for field in config_fields(source):
        if comments.isdisjoint(range(field.lineno, field.end_lineno + 1)):
            found.append(source.at(field.lineno, f"{field.target.id} has no advice: add a comment"))
    return found


def training_loop(source: Source) -> tuple[int, int]:
    """First line of `for step in range(...)` in `main` and last line of the `try` around it.

    Raises LookupError.
    """
    for function in source.functions:
        if function.name == "main":
            return loop_lines(function)
    raise LookupError(f"{source.name}:1: no function main")


def loop_lines(function) -> tuple[int, int]:
    nodes = list(ast.walk(function))
    loops = [node for node in nodes if isinstance(node, ast.For) and is_step_loop(node)]
    if not loops:
        raise LookupError(f"train.py:{function.lineno}: main has no `for step in range(...)`")
    loop = loops[0]
    end = loop.end_lineno
    for node in nodes:
        if isinstance(node, ast.Try) and is_inside(loop, node.body):
            end = node.body[-1].end_lineno
    return loop.lineno, end


def is_inside(node: ast.stmt, block: list[ast.stmt]) -> bool:
    return block[0].lineno <= node.lineno <= block[-1].end_lineno


def is_step_loop(loop: ast.For) -> bool:
    match loop:
        case ast.For(target=ast.Name(id="step"), iter=ast.Call(func=ast.Name(id="range"))):
            return True
    return False


def phases(source: Source) -> list[int]:
    """The numbers of the banners in the loop, such as `# 2. Rollout, 3. reward: ...`."""
    start, end = training_loop(source)
    numbers = []
    for comment in source.comments:
        banner = comment.text.lstrip("-=# ")
        if start <= comment.line <= end and not comment.trailing and banner[:1].isdigit():
            numbers += re.findall(r"(?:^|, |and )(\d)[.:]? [A-Za-z]", banner)
    return [int(number) for number in numbers]


STYLE = (
    long_lines,
    formatter_switches,
    dense_statements,
    parallel_assignments,
    crowded_expressions,
    tricks,
    long_functions,
    deep_nesting,
    many_parameters,
    long_trailing_comments,
)


def print_figures(source: Source) -> None:
    sizes = [size for size, _ in statement_sizes(source)] or [0]
    figures = {
        "tokens": source.tokens,
        "statement p90": sizes[position_90(sizes)],
        "max": sizes[-1],
        "longest function": max(map(function_lines, source.functions), default=0),
        "rules broken": sum(len(rule(source)) for rule in STYLE),
    }
    line = ", ".join(f"{name} {figure:4}" for name, figure in figures.items())
    print(f"{source.name:23} {line}")


def main() -> None:
    sources = {name: read(name) for name in product_files()}
    for source in sources.values():
        print_figures(source)
    run = loaded_by(STAGES, import_graph(sources))
    total = sum(sources[name].tokens for name in run)
    print(f"a run loads {len(run)} files, {total} tokens: {' '.join(run)}")


if __name__ == "__main__":
    main()
