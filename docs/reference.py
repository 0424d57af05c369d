"""Writes docs/reference.md: every public name with its fields and methods, from the docstrings in the source.

`python docs/reference.py` (or `make reference`) after a change of a public name; a test compares the two. Reads the
source and imports nothing.
"""

import ast
import inspect
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "satrap"
GROUPS = {
    "Tables and features": ["config.tables.Table", "config.tables.Feature", "config.features.Features"],
    "Optimizers of tables": [
        f"config.tables.{n}" for n in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "Ftrl")
    ],
    "Initial values and admission": [
        f"config.tables.{n}"
        for n in ("Uniform", "Normal", "ScaledUniform", "Constant", "Zeros", "Always", "Probability", "MinCount")
    ],
    "Training": [
        "train.embeddings.Embeddings", "train.stream.Stream", "train.batch.Batch", "train.batch.Sequence",
        "train.optimizer.HybridOptimizer",
        "checkpoint.checkpoint.Checkpoint", "monitor.report.Counters",
    ],
    "Progress": [
        "monitor.progress.Progress", "monitor.sinks.Screen", "monitor.sinks.JsonLines",
        "monitor.sinks.TensorBoard", "monitor.report.Report",
    ],
    "Evaluation": [
        "train.evaluation.evaluate", "train.evaluation.auc", "monitor.metrics.Evaluation", "serving.reader.Reader",
        "serving.reader.ReaderTable",
    ],
    "Sources": [
        "data.source.Source", "data.parquet.Parquet", "data.delimited.CSV", "data.criteo.Criteo",
        "data.arrow.Arrow", "data.frame.Frame", "data.iterable.Iterable", "data.inputs.Inputs", "data.inputs.Position",
    ],
    "Columns of a source": ["config.columns.DenseColumn", "config.columns.IdColumn", "config.columns.LabelColumn"],
    "Models": ["models.dlrm.DLRM", "models.dcn.DCN", "models.ffnn.FFNN"],
    "Synthetic data": ["data.synthetic.Clicks", "data.synthetic.Best"],
    "The table alone": ["table.store.Store", "table.table_group.TableGroup"],
}  # fmt: skip


def reference() -> str:
    """The whole text."""
    lines = [
        "# Reference",
        "",
        "Written by `make reference` from the docstrings. [training.md](training.md) is the guide.",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            module, _, item = name.rpartition(".")
            lines += ["", *described(module, item)]
    return "\n".join(lines) + "\n"


def described(module: str, name: str) -> list[str]:
    """One class or function."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name)
    if isinstance(node, ast.FunctionDef):
        return [f"### {called(node)}", "", paragraph(ast.get_docstring(node))]
    init = next((each for each in methods(node) if each.name == "__init__"), None)
    lines = [f"### {name}{called(init, bound=True).removeprefix('__init__') if init else ''}", ""]
    of_file = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
    lines.append(paragraph((ast.get_docstring(node) or "").replace("See the file's docstring.", of_file)))
    if init is not None and (text := ast.get_docstring(init)):
        lines += ["", paragraph(text)]
    lines += fields(node)
    for method in methods(node):
        if method.name.startswith("_") or "overload" in map(ast.unparse, method.decorator_list):
            continue
        shown = method.name if "property" in map(ast.unparse, method.decorator_list) else called(method, bound=True)
        lines += ["", f"`{shown}`: {paragraph(ast.get_docstring(method))}"]
    return lines


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated fields with the strings below them."""
    lines = []
    for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        default = "" if field.value is None else f" = {ast.unparse(field.value)}"
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        lines += ["", f"`{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}`"]
        if isinstance(text, str) and text:
            lines.append(paragraph(inspect.cleandoc(text)))
    return lines


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Those written in the class."""
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def called(function: ast.FunctionDef, *, bound: bool = False) -> str:
    """Its name and arguments, without types."""
    arguments = ast.parse(f"def f({ast.unparse(function.args)}): pass").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for each in [*arguments.args.posonlyargs, *arguments.args.args, *arguments.args.kwonlyargs]:
        each.annotation = None
    for rest in (arguments.args.vararg, arguments.args.kwarg):
        if rest is not None:
            rest.annotation = None
    text = ast.unparse(arguments.args)
    for self in ("self, ", "cls, ", "self", "cls"):
        if bound and text.startswith(self):
            text = text[len(self) :]
            break
    return f"{function.name}({text})"


def paragraph(text: str | None) -> str:
    """Markdown of a docstring: its lists keep their lines."""
    return (text or "").replace("\n", "  \n").replace("  \n  \n", "\n\n")


if __name__ == "__main__":
    (ROOT / "docs" / "reference.md").write_text(reference())
