"""Writes docs/reference/ from the running package: public names with their arguments, attributes and methods, by topic.

`make reference` writes the pages after a change of a public name or docstring; tests/project/test_reference.py compares
the two and compares the pages with the package. Classes are found by import; docs/declared.py reads their source.
"""

import ast
import inspect
import re
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from declared import (
    Member,
    argument_names,
    class_tree,
    constructor,
    is_ours,
    members_of,
    module_tree,
    shown_type,
    split_arguments,
)

FOLDER = Path(__file__).with_name("reference")


@dataclass(frozen=True)
class Topic:
    """One page: its title, an introduction, and the names of each of its groups."""

    title: str
    introduction: str
    groups: dict[str, tuple[str, ...]]
    """The title of a group and where its names are defined. A page with one group does not show the title."""


_DICTS = "`to_dict()` of these objects returns plain JSON types, and `from_dict(data)` of their class reads them."
TOPICS = {
    "tables": Topic(
        "Tables, optimizers and initial values",
        f"The guide is [training](../training.md). {_DICTS}",
        {
            "Tables and features": ("config.tables.Table", "config.tables.Feature", "config.features.Features"),
            "Optimizers of tables": tuple(
                f"config.optimizers.{name}" for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "Ftrl")
            ),
            "Initial values of rows": tuple(
                f"config.tables.{name}" for name in ("Uniform", "Normal", "ScaledUniform", "Constant", "Zeros")
            ),
            "Admission of ids": tuple(f"config.tables.{name}" for name in ("Always", "Probability", "MinCount")),
        },
    ),
    "data": Topic(
        "Data",
        f"The guide is [data sources](../sources.md). {_DICTS}",
        {
            "Sources": (
                *("data.source.Source", "data.parquet.Parquet", "data.delimited.CSV", "data.criteo.Criteo"),
                *("data.arrow.Arrow", "data.json_lines.JSON", "data.tfrecord.TFRecord", "data.frame.Frame"),
                "data.iterable.IterableSource",
            ),
            "Columns of a source": tuple(
                f"config.columns.{name}" for name in ("DenseColumn", "IdColumn", "LabelColumn")
            ),
            "Batches of a source": ("data.inputs.Inputs", "data.inputs.Position", "data.vectors.read_vectors"),
            "Synthetic data: satrap.synthetic": ("data.synthetic.Clicks", "data.synthetic.BestMetrics"),
        },
    ),
    "training": Topic(
        "Training",
        "The guides are [training](../training.md) and [other training loops](../loops.md).",
        {
            "": (
                *("train.embeddings.Embeddings", "train.stream.Stream", "train.batch.Batch", "train.sequence.Sequence"),
                "train.prefetched_batches.PrefetchedBatches",
                *("train.sequence.JaggedSequence", "train.optimizer.HybridOptimizer", "monitor.report.Counters"),
            )
        },
    ),
    "evaluation": Topic(
        "Progress and evaluation",
        "[Training](../training.md) shows them in a training script.",
        {
            "Reports of a run": (
                *("monitor.progress.Progress", "monitor.sinks.Screen", "monitor.sinks.JsonLines"),
                *("monitor.sinks.TensorBoard", "monitor.report.Report"),
            ),
            "Metrics of a model": (
                *("train.evaluation.evaluate", "train.evaluation.auc", "monitor.metrics.Evaluation"),
                "train.validation.Validation",
            ),
        },
    ),
    "models": Topic(
        "Models and retrieval",
        "Models are ordinary `torch.nn.Module`s over `batch.dense` and `batch.embeddings`.",
        {
            "Networks: satrap.models": (
                *("models.dlrm.DLRM", "models.dcn.DCN", "models.deepfm.DeepFM", "models.ffnn.FFNN"),
                *("models.din.DIN", "models.hstu.HSTU", "models.sasrec.SASRec", "models.two_tower.TwoTower"),
            ),
            "In place of torch's modules: satrap.nn": (
                *("nn.embedding.Embedding", "nn.embedding.EmbeddingBag", "nn.convert.convert"),
            ),
            "Search in all rows": ("train.retrieval.topk", "train.retrieval.full_softmax"),
            "Negatives: satrap.negatives": tuple(
                f"train.negatives.{name}" for name in ("in_batch", "Counts", "Draws", "add")
            ),
        },
    ),
    "checkpoints": Topic(
        "Saving and reading checkpoints",
        "The guide is [checkpoints](../checkpoints.md).",
        {"": ("checkpoint.checkpoint.Checkpoint", "serving.reader.Reader", "serving.reader.ReaderTable")},
    ),
    "clusters": Topic(
        "Servers, workers and trainers",
        "The guide is [a cluster](../cluster.md).",
        {
            "": (
                *("train.deployment.Deployment", "train.process_group.ProcessGroup"),
                *("worker.sharded_tables.ShardedTables", "worker.sharded_tables.ShardedTable"),
            )
        },
    ),
    "store": Topic(
        "Tables without training",
        "Tables in the memory of this process, without torch.",
        {"": ("table.store.Store", "table.store.StoredRows", "table.table_group.TableGroup")},
    ),
}
"""The pages and what each describes: the public names."""
INTERNAL = {
    "Config": "to_dict from_dict",
    "Embedding": "extra_repr get_extra_state set_extra_state",
    "EmbeddingBag": "extra_repr get_extra_state set_extra_state",
    "Progress": "clock",
    "Serializable": "to_dict from_dict",
}
"""Arguments that other packages of Satrap use and users do not, by class; and the forms that an introduction describes.
`satrap.hidden_names` hides members of the first kind."""
INTERNAL_ERRORS = {"MovedError"}
"""Exceptions that one process of Satrap raises for another, which handles it."""
RETURNED = {
    "Batch": "Streams yield batches, and `Reader` returns one for `Inputs`.",
    "BestMetrics": "Returned by `Clicks.best_metrics`.",
    "Counters": "Returned by `Embeddings.counters` and `Stream.counters`.",
    "Evaluation": "Returned by `evaluate`.",
    "HybridOptimizer": "Returned by `Embeddings.optimizer`.",
    "JaggedSequence": "`batch[name]` of a jagged sequence.",
    "PrefetchedBatches": "Returned by `Embeddings.prefetch`.",
    "ProcessGroup": "The type of `Embeddings.trainers`.",
    "ReaderTable": "The type of the values of `Reader.tables`.",
    "Report": "A sink of `Progress` receives one for each interval.",
    "Sequence": "`batch[name]` of a padded sequence.",
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
WIDTH = 80


@dataclass
class Described:
    """A class of a page."""

    cls: type
    members: dict[str, Member] = field(default_factory=dict)
    """By name, those of base classes first, without internal ones."""


def documented() -> dict[str, object]:
    """Return the classes and functions of TOPICS, by name."""
    return {name: value for topic in TOPICS for name, value in _items(topic).items()}


def pages() -> dict[str, str]:
    """Return the text of every page by the name of its file."""
    texts = {f"{name}.md": _page(name) for name in TOPICS}
    return {"index.md": _index(), **texts, "errors.md": _errors()}


@cache
def _items(topic: str) -> dict[str, object]:
    paths = [path.rpartition(".") for group in TOPICS[topic].groups.values() for path in group]
    return {name: getattr(import_module(f"satrap.{module}"), name) for module, _, name in paths}


def _index() -> str:
    lines = ["# Reference", "", "The public names of Satrap, generated from its docstrings by `make reference`.", ""]
    for name, topic in TOPICS.items():
        items = ", ".join(f"[{item}]({name}.md#{item.lower()})" for item in _items(name))
        lines.append(f"- [{topic.title}]({name}.md): {items}")
    return "\n".join([*lines, "- [Exceptions](errors.md)"]) + "\n"


def _page(name: str) -> str:
    topic = TOPICS[name]
    lines = [f"# {topic.title}", "", topic.introduction]
    for group, paths in topic.groups.items():
        lines += ["", f"## {group}"] if group else []
        for path in paths:
            item = path.rpartition(".")[2]
            lines += ["", f"### {item}", "", *_item(_items(name)[item])]
    return "\n".join(lines) + "\n"


def describe(cls: type) -> Described:
    """Collect the public members of a class and of those of its bases that are Satrap's."""
    described = Described(cls)
    hidden = hidden_of(cls)
    for base in filter(is_ours, reversed(cls.__mro__)):
        for member in members_of(base):
            known = described.members.get(member.name)
            if known is not None and not member.text:
                member.text, member.type = known.text, member.type or known.type
            if not member.name.startswith("_") and member.name not in hidden:
                described.members[member.name] = member
    return described


def hidden_of(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in (*INTERNAL.get(base.__name__, "").split(), *_internal_of(base))}


def _internal_of(cls: type) -> tuple[str, ...]:
    """Return the members that `satrap.hidden_names.internal` hides."""
    names: tuple[str, ...] = vars(cls).get("_internal", ())
    return names


def _item(item: object) -> list[str]:
    """Describe one function or class below its heading."""
    if isinstance(item, type):
        return _class(item)
    assert inspect.isfunction(item)
    functions = (node for node in module_tree(item.__module__).body if isinstance(node, ast.FunctionDef))
    return _function(next(node for node in functions if node.name == item.__name__), item.__name__)


def _class(cls: type) -> list[str]:
    """Describe a class: how it is constructed, what it extends, then its fields, attributes and methods."""
    described = describe(cls)
    bases = [base for base in cls.__mro__[1:] if documented().get(base.__name__) is base]
    inherited = {name: member for base in reversed(bases) for name, member in describe(base).members.items()}
    own = [member for member in described.members.values() if member.name not in inherited or member.owner is cls]
    init = None if cls.__name__ in RETURNED else constructor(cls)
    has_fields = is_dataclass(cls) or hasattr(cls, "_fields")
    lines: list[str] = []
    if has_fields and cls.__name__ not in RETURNED:
        lines += _code(_wrapped(f"{cls.__name__}(", _field_parameters(cls, described, inherited), ")"))
    elif init is not None:
        lines += _code(_signature(init, cls.__name__, hidden_of(cls)))
    of_module = (ast.get_docstring(module_tree(cls.__module__)) or "").partition("\n\n")[0].replace("\n", " ")
    text = (ast.get_docstring(class_tree(cls)) or "").replace("See the file's docstring.", of_module)
    text, _ = split_arguments(text, set(described.members))
    lines += [_with_code(text), ""] if text else []
    if cls.__name__ in RETURNED:
        lines += [RETURNED[cls.__name__], ""]
    if bases:
        lines += [f"Extends {', '.join(_link(base.__name__) for base in bases)}.", ""]
    of_arguments: set[str] = set()
    if init is not None and (text := ast.get_docstring(init)):
        names = argument_names(init)
        of_arguments = {name for words in split_arguments(text, names)[1] for name in words.split("`, `")}
        lines += [*_paragraphs(text, names), ""]
    supported = [
        words for name, words in PROTOCOLS.items() if any(name in vars(base) for base in filter(is_ours, cls.__mro__))
    ]
    if supported:
        lines += [f"It {', '.join(supported)}.", ""]
    fields = [member for member in own if member.is_field]
    attributes = [member for member in own if member.function is None and not member.is_field]
    attributes = [member for member in attributes if member.name not in of_arguments]
    shows_types = cls.__name__ in RETURNED
    for title, members in (("Fields", fields), ("Attributes", attributes)):
        if members:
            is_typed = title == "Attributes" or shows_types
            lines += [f"**{title}**", "", *(_attribute(member, is_typed=is_typed) for member in members), ""]
    for member in own:
        if member.function is not None and (member.text or member.name not in inherited):
            lines += [f"#### {cls.__name__}.{member.name}", "", *_function(member.function, member.name), ""]
    return lines[:-1]


@cache
def _page_of() -> dict[str, str]:
    """The file that describes each name."""
    errors = {value.__name__: "errors.md" for value in _exceptions()}
    return {item: f"{name}.md" for name in TOPICS for item in _items(name)} | errors


def _link(name: str) -> str:
    return f"[{name}]({_page_of()[name]}#{name.lower()})"


def _attribute(member: Member, *, is_typed: bool) -> str:
    shown = member.name
    if is_typed:
        shown += (f": {member.type}" if member.type else "") + (
            "" if member.default is None else f" = {member.default}"
        )
    text = " ".join(member.text.split())
    return f"- `{shown}`" + (f": {text}" if text else "")


def _field_parameters(cls: type, described: Described, inherited: dict[str, Member]) -> list[str]:
    """The arguments of a class whose fields are its arguments: those that it adds, or gives another default."""
    shown: list[str] = []
    bases = [base for base in cls.__mro__[1:] if documented().get(base.__name__) is base]
    is_shortened = False
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        member = described.members[name]
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY
        if bases and name in inherited and member.owner is not cls and not is_positional:
            is_shortened = True
        else:
            shown.append(f"{name}: {member.type}" + ("" if member.default is None else f" = {member.default}"))
    return [*shown, f"...  # and the fields of {bases[0].__name__}"] if is_shortened else shown


def _function(node: ast.FunctionDef, name: str) -> list[str]:
    """The signature of a function or method, its text and its arguments."""
    return [*_code(_signature(node, name)), *_paragraphs(ast.get_docstring(node) or "", argument_names(node))]


def _signature(node: ast.FunctionDef, name: str, hidden: set[str] | None = None) -> list[str]:
    """The call with types and defaults, on one line if it is short."""
    arguments = node.args
    shown: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    no_default = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        default = arguments.defaults[number - no_default] if number >= no_default else None
        if number > 0 or argument.arg not in ("self", "cls"):
            shown.append(_argument(argument, default))
    if arguments.vararg is not None:
        shown.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if argument.arg not in (hidden or ()):
            shown.append(_argument(argument, value))
    if arguments.kwarg is not None and ast.unparse(arguments.kwarg.annotation or arguments.kwarg) != "Never":
        shown.append("**" + _argument(arguments.kwarg, None))
    returned = "" if node.returns is None or node.name == "__init__" else f" -> {shown_type(node.returns)}"
    return _wrapped(f"{name}(", shown, f"){returned}")


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    typed = argument.arg + ("" if argument.annotation is None else f": {shown_type(argument.annotation)}")
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def _wrapped(begin: str, parts: list[str], end: str) -> list[str]:
    line = begin + ", ".join(parts) + end
    if len(line) <= WIDTH and not any("#" in part for part in parts):
        return [line]
    return [begin, *(f"    {part}" + ("" if "#" in part else ",") for part in parts), end]


def _code(lines: list[str]) -> list[str]:
    return ["```py", *lines, "```", ""]


def _with_code(text: str) -> str:
    """Markdown of a docstring, in which an example is a paragraph that begins like a statement with a block."""
    paragraphs = text.split("\n\n")
    is_example = re.compile(r"(?:with|for) .*:\n    ")
    return "\n\n".join(f"```py\n{part}\n```" if is_example.match(part) else part for part in paragraphs)


def _paragraphs(text: str, arguments: set[str]) -> list[str]:
    """Markdown of a docstring: what it says of single arguments becomes a list at its end."""
    rest, of_arguments = split_arguments(text, arguments)
    lines = [_with_code(rest), ""] if rest else []
    lines += [f"- `{name}`: {words}" for name, words in of_arguments.items()]
    return lines if of_arguments else lines[:-1]


def _exceptions() -> list[type]:
    errors = vars(import_module("satrap.errors")).values()
    return [value for value in errors if isinstance(value, type) and value.__name__ not in INTERNAL_ERRORS]


def _errors() -> str:
    """The tree of exceptions, then what each one means."""
    lines = ["# Exceptions", "", "A message names what was found, what was expected and what to do."]
    for cls in _exceptions():
        bases = [_link(base.__name__) if is_ours(base) else f"`{base.__name__}`" for base in cls.__bases__]
        lines += ["", f"### {cls.__name__}", "", f"Extends {', '.join(bases)}.", ""]
        lines += _paragraphs(inspect.cleandoc(cls.__doc__ or ""), set())
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
