"""What classes and functions of Satrap declare, read from their source: docs/reference.py makes pages of it.

Text, types and defaults are shown as the source writes them, but for three things: an alias of one file is shown as
what it stands for, a protocol as the class that users pass, and a private constant as an ellipsis.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

SHOWN_TYPES = {
    "Batches": "Iterator[Inputs]",
    "HasCounters": "Embeddings",
    "InFlightBatch": "Batch",
    "Interaction": "nn.Module",
    "Listed": "Store",
    "Metric": "Callable[..., Any]",
    "Part": "tuple[NDArray[np.uint64], NDArray[np.float32]]",
    "ReadBatch": "Inputs",
    "Rows": "Store | ShardedTable",
    "SavesBest": "Checkpoint",
    "Sink": "Screen | JsonLines | TensorBoard",
    "SteppedBatch": "Batch",
}
"""Types that are not public, and what users pass or get for them."""
_ALIAS = re.compile(r"(Literal\[|NDArray\[|str \| |\w+( \| \w+)+$)")


@dataclass
class Member:
    """One attribute or method of a class."""

    name: str
    owner: type
    text: str = ""
    type: str = ""
    default: str | None = None
    function: ast.FunctionDef | None = None
    """The method, if it is one; a property is an attribute."""
    is_field: bool = False


def is_ours(cls: type) -> bool:
    """Return whether a class is defined in Satrap."""
    return cls.__module__.partition(".")[0] == "satrap"


@cache
def module_tree(module: str) -> ast.Module:
    """Return the source of a module, with its types and constants as users see them."""
    tree = ast.parse(Path(inspect.getfile(import_module(module))).read_text())
    shown = _Shown(module)
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)]) if _ALIAS.match(ast.unparse(statement.value)):
                shown.types[name] = ast.unparse(statement.value)
    return shown.visit(tree)  # type: ignore[no-any-return]


class _Shown(ast.NodeTransformer):
    """Replaces the names in a module that its users cannot import."""

    def __init__(self, module: str) -> None:
        self.types = dict(SHOWN_TYPES)
        self._module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self.types:
            return ast.parse(self.types[node.id], mode="eval").body
        if re.fullmatch(r"_[A-Z][A-Z_]+", node.id):
            return ast.Constant(...)
        value = getattr(import_module(self._module), node.id, None) if node.id.isupper() else None
        return ast.Constant(value) if isinstance(value, int) else node


def shown_type(annotation: ast.expr) -> str:
    """Return a type without the quotes of a forward reference."""
    text = re.sub(r"^'(.*)'$", r"\1", ast.unparse(annotation))
    return re.sub(r"'([A-Z]\w+)'", r"\1", text)


def class_tree(cls: type) -> ast.ClassDef:
    """Return the source of a class."""
    return next(
        node
        for node in module_tree(cls.__module__).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )


def constructor(cls: type) -> ast.FunctionDef | None:
    """Return the `__init__` that was written for a class, or for one of its bases."""
    for base in cls.__mro__:
        if is_ours(base):
            for node in class_tree(base).body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    return node
    return None


def argument_names(node: ast.FunctionDef) -> set[str]:
    """Return the names of the arguments of a function."""
    return {argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


def split_arguments(text: str, arguments: set[str]) -> tuple[str, dict[str, str]]:
    """Return a docstring without its lines `argument: text`, and these texts by argument."""
    kept: list[str] = []
    texts: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        name, colon, words = line.partition(":")
        if colon and arguments.issuperset(name.split(", ")):
            last = name.replace(", ", "`, `")
            texts[last] = words.strip()
        elif last and line.startswith("    "):
            texts[last] += " " + line.strip()
        else:
            last = ""
            kept.append(line)
    return re.sub("\n{3,}", "\n\n", "\n".join(kept)).strip(), texts


def members_of(cls: type) -> Iterator[Member]:
    """Yield what one class declares: fields, attributes that `__init__` assigns, properties and methods."""
    node = class_tree(cls)
    has_fields = is_dataclass(cls) or hasattr(cls, "_fields")
    names = {ast.unparse(statement.target) for statement in node.body if isinstance(statement, ast.AnnAssign)}
    _, of_fields = split_arguments(ast.get_docstring(node) or "", names)
    for statement, after in _with_next(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = None if statement.value is None else _default(statement.value)
            yield Member(
                statement.target.id,
                cls,
                _string(after) or of_fields.get(statement.target.id, ""),
                shown_type(statement.annotation),
                default if has_fields else None,
                is_field=has_fields,
            )
        elif isinstance(statement, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in statement.decorator_list}
            text = ast.get_docstring(statement) or ""
            if statement.name == "__init__":
                yield from _assigned(cls, statement)
            elif decorators & {"property", "cached_property"}:
                returned = "" if statement.returns is None else shown_type(statement.returns)
                yield Member(statement.name, cls, text, returned)
            elif not any(name == "overload" or name.endswith(".setter") for name in decorators):
                yield Member(statement.name, cls, text, function=statement)


def _assigned(cls: type, init: ast.FunctionDef) -> Iterator[Member]:
    """Yield the attributes that `__init__` assigns, with the strings below them and what is known of their types."""
    arguments = [*init.args.args, *init.args.kwonlyargs]
    types = {argument.arg: shown_type(argument.annotation) for argument in arguments if argument.annotation}
    _, of_arguments = split_arguments(ast.get_docstring(init) or "", argument_names(init))
    for statement, after in _with_next(init.body):
        if isinstance(statement, ast.AnnAssign):
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(statement.target, statement.value)]
        elif isinstance(statement, ast.Assign):
            pairs = [pair for target in statement.targets for pair in _pairs(target, statement.value)]
        else:
            continue
        for target, value in pairs:
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                continue
            is_typed = isinstance(statement, ast.AnnAssign)
            known = shown_type(statement.annotation) if is_typed else _type_of(value, types)
            text = of_arguments.get(value.id, "") if isinstance(value, ast.Name) else ""
            yield Member(target.attr, cls, _string(after) or text, known)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment with its value; None where the value is not a tuple in the source."""
    if not isinstance(target, ast.Tuple):
        yield target, value
    elif isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield from ((element, None) for element in target.elts)


def _type_of(value: ast.expr | None, types: dict[str, str]) -> str:
    """Return the type of an assigned value where the source shows it: an argument, a new object, a count."""
    if isinstance(value, ast.Name):
        return types.get(value.id, "")
    if isinstance(value, ast.Constant) and value.value is not None:
        return type(value.value).__name__
    if isinstance(value, ast.Compare) or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)):
        return "bool"
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        name = value.func.id
        return name if name[0].isupper() or name in ("tuple", "dict", "list", "str", "int") else ""
    return ""


def _default(value: ast.expr) -> str | None:
    """Return a field's default; a factory is shown as what it makes."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        options = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in options:
            factory = ast.unparse(options["default_factory"])
            return {"dict": "{}", "list": "[]"}.get(factory, f"{factory}()")
        return ast.unparse(options["default"]) if "default" in options else None
    return ast.unparse(value)


def _with_next(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    return pairwise([*body, ast.Pass()])


def _string(statement: ast.stmt) -> str:
    """Return the docstring below an attribute; "" for any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else ""
    return ""
