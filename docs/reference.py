"""Generates docs/reference.md from the running package: public names, arguments, attributes, methods and exceptions.

`make reference` writes the file after a change of a public name or docstring; tests/project/test_reference.py compares
the two and compares the page with the package. Classes are found by import; their text, types and defaults are read
from their source, as they are written there.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).with_name("reference.md")
GROUPS = {
    "Tables and features": [
        *("config.tables.Table", "config.tables.Feature", "config.features.Features", "config.validation.Config"),
    ],
    "Optimizers of tables": [
        f"config.optimizers.{name}" for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "Ftrl")
    ],
    "Initial values and admission": [
        f"config.tables.{name}"
        for name in ("Uniform", "Normal", "ScaledUniform", "Constant", "Zeros", "Always", "Probability", "MinCount")
    ],
    "Training": [
        *(
            "train.embeddings.Embeddings",
            "train.deployment.Deployment",
            "train.stream.Stream",
            "train.batch.Batch",
            "train.batch.Sequence",
        ),
        *("train.optimizer.HybridOptimizer", "train.process_group.ProcessGroup", "checkpoint.checkpoint.Checkpoint"),
        "monitor.report.Counters",
    ],
    "Progress": [
        *("monitor.progress.Progress", "monitor.sinks.Screen", "monitor.sinks.JsonLines"),
        *("monitor.sinks.TensorBoard", "monitor.report.Report"),
    ],
    "Evaluation": [
        *("train.evaluation.evaluate", "train.evaluation.auc", "monitor.metrics.Evaluation"),
        "train.validation.Validation",
        *("serving.reader.Reader", "serving.reader.ReaderTable"),
    ],
    "Sources": [
        *("data.source.Source", "data.parquet.Parquet", "data.delimited.CSV", "data.criteo.Criteo"),
        *(
            "data.arrow.Arrow",
            "data.json_lines.JSON",
            "data.tfrecord.TFRecord",
            "data.frame.Frame",
            "data.iterable.IterableSource",
            "data.inputs.Inputs",
        ),
        "data.inputs.Position",
        "data.vectors.read_vectors",
    ],
    "Columns of a source": ["config.columns.DenseColumn", "config.columns.IdColumn", "config.columns.LabelColumn"],
    "Retrieval": [
        *("train.retrieval.topk", "train.retrieval.full_softmax", "train.negatives.in_batch", "train.negatives.Counts"),
        *("train.negatives.Draws", "train.negatives.add"),
    ],
    "Modules": ["nn.embedding.Embedding", "nn.embedding.EmbeddingBag", "nn.convert.convert"],
    "Models": ["models.dlrm.DLRM", "models.dcn.DCN", "models.ffnn.FFNN"],
    "Synthetic data": ["data.synthetic.Clicks", "data.synthetic.BestMetrics"],
    "The table alone": [
        *("table.store.Store", "table.store.StoredRows", "table.table_group.TableGroup"),
        *("worker.sharded_tables.ShardedTables", "worker.sharded_tables.ShardedTable"),
    ],
}
"""The sections of the page and what each describes: the public names, and the types of what public calls return."""
INTERNAL = {
    "Embeddings": "extra_repr get_extra_state set_extra_state settings worker",
    "Embedding": "extra_repr get_extra_state set_extra_state",
    "EmbeddingBag": "extra_repr get_extra_state set_extra_state",
    "HybridOptimizer": "hold",
    "LabelColumn": "expected find_invalid other_value text_values",
    "Position": "after",
    "ProcessGroup": "all count run_first broadcast_int gather exchange require_same_gradients wrap broadcast_",
    "ShardedTables": "is_whole keeps_cuts map_version require_permitted restore take_cut",
    "Source": "origin",
    "Store": "fill forget_saves in_engine save_part",
    "Stream": "drop evaluation is_over joint pause update",
    "TableGroup": "fill in_engine is_whole keeps_cuts map_version require_permitted restore take_cut verify",
}
"""Public members that other packages of Satrap call and users do not, by class."""
RETURNED = {
    "Batch": "Streams yield batches, and `Reader` returns one for `Inputs`.",
    "BestMetrics": "Returned by `Clicks.best_metrics`.",
    "Counters": "Returned by `Embeddings.counters` and `Stream.counters`.",
    "Evaluation": "Returned by `evaluate`.",
    "HybridOptimizer": "Returned by `Embeddings.optimizer`.",
    "ProcessGroup": "The type of `Embeddings.trainers`.",
    "ReaderTable": "The type of the values of `Reader.tables`.",
    "Sequence": "`batch[name]` of a feature without pooling.",
    "ShardedTable": "The type of the values of `Embeddings.tables` over servers.",
    "ShardedTables": "The type of `Embeddings.tables` over servers.",
    "StoredRows": "Returned by `read` of a table.",
    "Stream": "Returned by `Embeddings.stream` and `Reader.stream`.",
    "TableGroup": "The type of `Embeddings.tables` with rows in this process.",
}
"""Classes whose objects users get from calls, and from which: their constructors are left out."""
PROTOCOLS = {
    "__call__": "may be called",
    "__enter__": "is a context manager",
    "__contains__": "supports `in`",
    "__getitem__": "is indexed",
    "__iter__": "is iterated over",
    "__len__": "has a length",
}


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


@dataclass
class Described:
    """A class of the page."""

    cls: type
    members: dict[str, Member] = field(default_factory=dict)
    """By name, those of base classes first, without internal ones."""


def documented() -> dict[str, object]:
    """The classes and functions of GROUPS, by name."""
    found = {}
    for path in (path for paths in GROUPS.values() for path in paths):
        module, _, name = path.rpartition(".")
        found[name] = getattr(import_module(f"satrap.{module}"), name)
    return found


def reference() -> str:
    """Return the whole page."""
    lines = ["# Reference", "", "The public names of Satrap, generated from its docstrings by `make reference`."]
    lines += ["Guides: [training](training.md), [data sources](sources.md), [cluster](cluster.md)."]
    for group, paths in GROUPS.items():
        lines += ["", f"## {group}"]
        for path in paths:
            name = path.rpartition(".")[2]
            lines += ["", f"### {name}", "", *_item(documented()[name])]
    return "\n".join([*lines, "", "## Exceptions", "", *_exceptions()]) + "\n"


def describe(cls: type) -> Described:
    """Collect the public members of a class and of those of its bases that are Satrap's."""
    found = Described(cls)
    hidden = {member for base in cls.__mro__ for member in INTERNAL.get(base.__name__, "").split()}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] != "satrap":
            continue
        for member in members_of(base):
            known = found.members.get(member.name)
            if known is not None and not member.text:
                member.text, member.type = known.text, member.type or known.type
            if not member.name.startswith("_") and member.name not in hidden:
                found.members[member.name] = member
    return found


def _item(item: object) -> list[str]:
    """Describe one function or class below its heading."""
    if inspect.isfunction(item):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(item))).body
        assert isinstance(node, ast.FunctionDef)
        return _function(node, node.name)
    assert isinstance(item, type)
    return _class(item)


def _class(cls: type) -> list[str]:
    """Describe a class: how it is constructed, what it extends, then its fields, attributes and methods."""
    described = describe(cls)
    node = _tree(cls)
    fields = [member for member in described.members.values() if member.is_field]
    init = _constructor(cls)
    lines = _code(_signature(init, cls.__name__)) if init is not None else []
    if cls.__name__ in RETURNED:
        init, lines = None, []
    elif is_dataclass(cls) or hasattr(cls, "_fields"):
        lines = _code(_wrapped(f"{cls.__name__}(", _field_parameters(cls, fields), ")"))
    of_module = (ast.get_docstring(_module_tree(cls.__module__)) or "").partition("\n\n")[0].replace("\n", " ")
    text = (ast.get_docstring(node) or "").replace("See the file's docstring.", of_module)
    text, of_fields = _without_arguments(text, set(described.members))
    for name, words in of_fields.items():
        described.members[name].text = words
    lines += [text, ""] if text else []
    if cls.__name__ in RETURNED:
        lines += [RETURNED[cls.__name__], ""]
    bases = [base for base in cls.__mro__[1:] if documented().get(base.__name__) is base]
    if bases:
        lines += [f"Extends {', '.join(_link(base.__name__) for base in bases)}.", ""]
    if init is not None and (text := ast.get_docstring(init)):
        lines += [*_paragraphs(text, _names(init)), ""]
    supported = [
        words for name, words in PROTOCOLS.items() if any(name in vars(base) for base in cls.__mro__ if _is_ours(base))
    ]
    if supported:
        lines += [f"It {', '.join(supported)}.", ""]
    inherited = {name for base in bases for name in describe(base).members}
    for title, members in (
        ("Fields", fields),
        ("Attributes", [each for each in described.members.values() if each.function is None and not each.is_field]),
    ):
        shown = [each for each in members if each.name not in inherited or each.owner is cls]
        if shown:
            lines += [f"**{title}**", "", *(_attribute(each) for each in shown), ""]
    for member in described.members.values():
        if member.function is not None and (member.name not in inherited or member.owner is cls):
            lines += [f"#### {cls.__name__}.{member.name}", "", *_function(member.function, member.name), ""]
    if inherited:
        names = [name for name in described.members if name in inherited and described.members[name].owner is not cls]
        if names:
            lines += [f"Inherited: {', '.join(f'`{name}`' for name in names)}.", ""]
    return lines[:-1]


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "satrap"


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _attribute(member: Member) -> str:
    shown = member.name + (f": {member.type}" if member.type else "")
    shown += "" if member.default is None else f" = {member.default}"
    text = " ".join(member.text.split())
    return f"- `{shown}`" + (f": {text}" if text else "")


def _field_parameters(cls: type, fields: list[Member]) -> list[str]:
    """The arguments of a class whose fields are its arguments, positional ones first."""
    by_name = {each.name: each for each in fields}
    shown: list[str] = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        member = by_name[name]
        shown.append(f"{name}: {member.type}" + ("" if member.default is None else f" = {member.default}"))
    return shown


def _function(node: ast.FunctionDef, name: str) -> list[str]:
    """The signature of a function or method, its text and its arguments."""
    return [*_code(_signature(node, name)), *_paragraphs(ast.get_docstring(node) or "", _names(node))]


def _names(node: ast.FunctionDef) -> set[str]:
    return {each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


def _signature(node: ast.FunctionDef, name: str) -> list[str]:
    """The call with types and defaults, on one line if it is short."""
    arguments = node.args
    shown: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    no_default = len(positional) - len(arguments.defaults)
    for number, each in enumerate(positional):
        default = arguments.defaults[number - no_default] if number >= no_default else None
        if number > 0 or each.arg not in ("self", "cls"):
            shown.append(_argument(each, default))
    if arguments.vararg is not None:
        shown.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_argument(each, value) for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None and ast.unparse(arguments.kwarg.annotation or arguments.kwarg) != "Never":
        shown.append("**" + _argument(arguments.kwarg, None))
    returned = "" if node.returns is None or node.name == "__init__" else f" -> {_type(node.returns)}"
    return _wrapped(f"{name}(", shown, f"){returned}")


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    typed = argument.arg + ("" if argument.annotation is None else f": {_type(argument.annotation)}")
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def _wrapped(begin: str, parts: list[str], end: str) -> list[str]:
    line = begin + ", ".join(parts) + end
    return [line] if len(line) <= 100 else [begin, *(f"    {part}," for part in parts), end]


def _type(annotation: ast.expr) -> str:
    """A type as a reader writes it: without quotes and without the aliases of one file."""
    text = re.sub(r"^'(.*)'$", r"\1", ast.unparse(annotation))
    return re.sub(r"(?<![.\w])\w+\b", lambda match: _aliases().get(match[0], match[0]), text)


@cache
def _aliases() -> dict[str, str]:
    """The names that modules give to unions and literals, with what these are."""
    modules = {path.rpartition(".")[0] for paths in GROUPS.values() for path in paths}
    return {
        statement.targets[0].id: ast.unparse(statement.value)
        for module in sorted(modules)
        for statement in _module_tree(f"satrap.{module}").body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if re.match(r"(Literal\[|str \| |\w+( \| \w+)+$)", ast.unparse(statement.value))
    }


def _code(lines: list[str]) -> list[str]:
    return ["```py", *lines, "```", ""]


def _paragraphs(text: str, arguments: set[str]) -> list[str]:
    """Markdown of a docstring: what it says of single arguments becomes a list at its end."""
    rest, of_arguments = _without_arguments(text, arguments)
    lines = [rest, ""] if rest else []
    lines += [f"- `{name}`: {words}" for name, words in of_arguments.items()]
    return lines if of_arguments else lines[:-1]


def _without_arguments(text: str, arguments: set[str]) -> tuple[str, dict[str, str]]:
    """A docstring without its lines `argument: text`, and these texts by argument."""
    kept: list[str] = []
    found: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        name, colon, words = line.partition(":")
        if colon and arguments.issuperset(name.split(", ")):
            last = name.replace(", ", "`, `")
            found[last] = words.strip()
        elif last and line.startswith("    "):
            found[last] += " " + line.strip()
        else:
            last = ""
            kept.append(line)
    return re.sub("\n{3,}", "\n\n", "\n".join(kept)).strip(), found


def _exceptions() -> list[str]:
    """The tree of exceptions, then what each one means."""
    errors = import_module("satrap.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    lines = ["A message names what was found, what was expected and what to do.", ""]
    for cls in classes:
        bases = [_link(base.__name__) if _is_ours(base) else f"`{base.__name__}`" for base in cls.__bases__]
        lines += [f"### {cls.__name__}", "", f"Extends {', '.join(bases)}.", ""]
        lines += [*_paragraphs(inspect.cleandoc(cls.__doc__ or ""), set()), ""]
    return lines[:-1]


@cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(Path(inspect.getfile(import_module(module))).read_text())


def _tree(cls: type) -> ast.ClassDef:
    """The source of a class."""
    return next(
        node
        for node in _module_tree(cls.__module__).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )


def _constructor(cls: type) -> ast.FunctionDef | None:
    """The `__init__` that was written for a class, or for one of its bases."""
    for base in cls.__mro__:
        if _is_ours(base):
            for node in _tree(base).body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    return node
    return None


def members_of(cls: type) -> Iterator[Member]:
    """What one class declares: fields, attributes that `__init__` assigns, properties and methods."""
    node = _tree(cls)
    has_fields = is_dataclass(cls) or hasattr(cls, "_fields")
    for statement, after in _with_next(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = None if statement.value is None else _default(statement.value)
            yield Member(
                statement.target.id,
                cls,
                _string(after),
                _type(statement.annotation),
                default if has_fields else None,
                is_field=has_fields,
            )
        elif isinstance(statement, ast.FunctionDef):
            decorators = {ast.unparse(each) for each in statement.decorator_list}
            if statement.name == "__init__":
                yield from _assigned(cls, statement)
            elif decorators & {"property", "cached_property"}:
                returned = "" if statement.returns is None else _type(statement.returns)
                yield Member(statement.name, cls, ast.get_docstring(statement) or "", returned)
            elif not any(each == "overload" or each.endswith(".setter") for each in decorators):
                yield Member(statement.name, cls, ast.get_docstring(statement) or "", function=statement)


def _assigned(cls: type, init: ast.FunctionDef) -> Iterator[Member]:
    """The attributes that `__init__` assigns, with the strings below them and what is known of their types."""
    types = {each.arg: _type(each.annotation) for each in [*init.args.args, *init.args.kwonlyargs] if each.annotation}
    _, of_arguments = _without_arguments(ast.get_docstring(init) or "", _names(init))
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
            known = _type(statement.annotation) if isinstance(statement, ast.AnnAssign) else _type_of(value, types)
            text = of_arguments.get(value.id, "") if isinstance(value, ast.Name) else ""
            yield Member(target.attr, cls, _string(after) or text, known)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target of an assignment with its value; None where the value is not a tuple in the source."""
    if not isinstance(target, ast.Tuple):
        yield target, value
    elif isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield from ((each, None) for each in target.elts)


def _type_of(value: ast.expr | None, types: dict[str, str]) -> str:
    """The type of an assigned value where the source shows it: an argument, a new object, a count."""
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
    """A field's default; a factory is shown as what it makes."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        options = {each.arg: each.value for each in value.keywords}
        if "default_factory" in options:
            made = ast.unparse(options["default_factory"])
            return {"dict": "{}", "list": "[]"}.get(made, f"{made}()")
        return ast.unparse(options["default"]) if "default" in options else None
    return ast.unparse(value)


def _with_next(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    return pairwise([*body, ast.Pass()])


def _string(statement: ast.stmt) -> str:
    """The docstring below an attribute; "" of any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else ""
    return ""


if __name__ == "__main__":
    PAGE.write_text(reference())
