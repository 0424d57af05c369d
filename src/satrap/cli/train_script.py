"""Writes the training script of `satrap train`: plain PyTorch over Satrap's public names, to be read and edited.

Pure: a plan in, text out. The script has the columns and all settings; it imports nothing of this package's `cli`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from satrap.cli.train_plan import ColumnPlan, LabelPlan
from satrap.data.column_profile import ColumnProfile

_WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """What the script has besides the columns."""

    path: str | Sequence[str]
    kind: str
    """The class of the source."""
    delimiter: str | None
    """The delimiter of text; None: the source is typed."""
    missing: tuple[str, ...]
    """Texts that stand for a missing value, besides those that were seen in the training data."""
    strip: bool
    """Whether blanks around texts are left out."""
    parts: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    """The options of the source that select the samples for training, for validation and for the test; with `path` if
    another file holds the test."""
    epochs: int
    """The most passes over the samples for training."""
    validate_steps: int
    """Steps from one validation to the next."""
    batch_size: int
    max_bad_rows: int
    staleness: int
    seed: int
    out: str
    checked: str | None
    """The relative path of data without which the script does not start; None: it has none."""


def write_script(plan: ColumnPlan, settings: ScriptSettings) -> str:
    """Return the text of the script."""
    parts = [
        _HEAD.format(data=_short_name(settings.path), label=re.sub(r"[\\\\\"`]", "_", plan.label.column)),
        _SETTINGS.format(run=_text(settings.out), **{name: getattr(settings, name) for name in _SHOWN}),
        _constants(plan),
        _source(plan, settings),
        _models(plan),
        _embeddings(plan, settings),
        _fit(settings),
        _MAIN.format(seed=settings.seed, num_dense=_num_dense(plan), check=_check(settings.checked)),
    ]
    return "".join(parts)


# -- constants ---------------------------------------------------------------------------------------------------------


def _constants(plan: ColumnPlan) -> str:
    ids = [f"{_text(feature.name)}: {feature.dim}" for feature in plan.features]
    text = "# The features of ids, with the dims of their embeddings.\n" + _wrapped("IDS = {", ids, "}")
    if bags := [_text(feature.name) for feature in plan.features if feature.is_bag]:
        text += "# Features whose columns hold lists.\n" + _wrapped("BAGS = [", bags, "]")
    if plan.numbers:
        facts = [f"{_text(number.name)}: ({_mean(number):.6g}, {_deviation(number):.6g})" for number in plan.numbers]
        text += "# The columns of numbers, with their means and deviations.\n" + _wrapped("NUMBERS = {", facts, "}")
    if logs := [_text(number.name) for number in plan.numbers if number.has_long_tail]:
        text += "# Numbers that are read as ln(1 + x).\n" + _wrapped("LOGS = [", logs, "]")
    return text + "\n\n"


def _mean(profile: ColumnProfile) -> float:
    return profile.log_mean if profile.has_long_tail else profile.mean


def _deviation(profile: ColumnProfile) -> float:
    return profile.log_deviation if profile.has_long_tail else profile.deviation


# -- the source --------------------------------------------------------------------------------------------------------


def _source(plan: ColumnPlan, settings: ScriptSettings) -> str:
    """Return the function that declares the data."""
    has_paths = "path" in settings.parts[0]
    arguments = ["path" if has_paths else _value(settings.path)]
    if plan.numbers:
        arguments.append("dense=dense")
    arguments.append(f"label={_label(plan.label)}")
    declared = [feature for feature in plan.features if feature.name != feature.column or feature.option]
    if declared:
        columns = []
        for feature in declared:
            column = _text(feature.column)
            if feature.option:
                column = f"satrap.IdColumn({column}, {feature.option})"
            columns.append(f"{_text(feature.name)}: {column}")
        arguments.append(_nested("ids={", columns, "}", 8))
    if settings.delimiter is not None:
        if missing := sorted(plan.missing_texts.union(settings.missing)):
            arguments.append(_nested("missing=[", list(map(_text, missing)), "]", 8))
        if settings.strip:
            arguments.append("strip=True")
        if settings.delimiter != ",":
            arguments.append(f"delimiter={_text(settings.delimiter)}")
    if settings.max_bad_rows:
        arguments.append(f"max_bad_rows={settings.max_bad_rows}")
    arguments += ["batch_size=BATCH_SIZE", f"seed={settings.seed}", "**options"]
    dense = ""
    if plan.numbers:
        log = ", log1p=name in LOGS" if any(number.has_long_tail for number in plan.numbers) else ""
        dense = _DENSE.format(log=log)
    head = _SOURCE.format(parameters="path, **options" if has_paths else "**options")
    body = "".join(f"        {argument},\n" for argument in arguments)
    return f"{head}{dense}    return satrap.{settings.kind}(\n{body}    )\n\n\n"


def _label(label: LabelPlan) -> str:
    options = []
    if label.values is not None:
        options.append("values={" + ", ".join(f"{_text(text)}: {int(n)}" for text, n in label.values.items()) + "}")
    if label.above is not None:
        options.append(f"above={label.above:g}")
    if label.drops_missing:
        options.append('missing="drop"')
    if not options:
        return _text(label.column)
    return _nested("satrap.LabelColumn(", [_text(label.column), *options], ")", 8)


# -- the end of the script ---------------------------------------------------------------------------------------------


def _models(plan: ColumnPlan) -> str:
    if not plan.numbers:
        return _MODELS_WITHOUT_NUMBERS
    return _MODELS.format(missing=_MISSING_INPUTS if _has_missing(plan) else "", num_dense=_num_dense(plan))


def _has_missing(plan: ColumnPlan) -> bool:
    return any(number.num_missing for number in plan.numbers)


def _num_dense(plan: ColumnPlan) -> str:
    """Return the number of inputs of the models besides embeddings, as code."""
    if not plan.numbers:
        return "0"
    return "2 * len(NUMBERS)" if _has_missing(plan) else "len(NUMBERS)"


def _embeddings(plan: ColumnPlan, settings: ScriptSettings) -> str:
    has_bags = any(feature.is_bag for feature in plan.features)
    table = 'table.bag("mean") if name in BAGS else table' if has_bags else "table"
    return _EMBEDDINGS.format(table=table, staleness=settings.staleness, seed=settings.seed)


def _fit(settings: ScriptSettings) -> str:
    """Return the function that trains and tests."""
    options = [[f"{name}={_value(value)}" for name, value in part.items()] for part in settings.parts]
    options[0] += ["shuffle=True", f"epochs={settings.epochs}"]
    sources = zip(("train", "validate", "test"), options, strict=True)
    lines = {name: _wrapped(f"    {name} = source(", arguments, ")", 4) for name, arguments in sources}
    shown = ['"model": name', f'"data": {_text(_short_name(settings.path))}']
    return _FIT.format(settings=_nested("settings={", shown, "}", 8), **lines)


def _check(path: str | None) -> str:
    """Return the statement that refuses to run in another folder, where a new folder RUN would be left."""
    if path is None:
        return ""
    return _CHECK.format(condition=_wrapped("    if not pathlib.Path(", [_text(path)], ").exists():", 4))


# -- text --------------------------------------------------------------------------------------------------------------


def _wrapped(opening: str, items: Sequence[str], closing: str, indent: int = 0) -> str:
    """Return a statement on one line if it fits, otherwise with one item on each line."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= _WIDTH:
        return line + "\n"
    blanks = " " * indent
    return f"{opening}\n" + "".join(f"{blanks}    {item},\n" for item in items) + f"{blanks}{closing}\n"


def _nested(opening: str, items: Sequence[str], closing: str, indent: int) -> str:
    """Return an argument that stands at this indent and is followed by a comma."""
    line = f"{opening}{', '.join(items)}{closing}"
    if indent + len(line) < _WIDTH:
        return line
    blanks = " " * indent
    return f"{opening}\n" + "".join(f"{blanks}    {item},\n" for item in items) + f"{blanks}{closing}"


def _text(text: str | None) -> str:
    """Return a string as Python code, in double quotes where that needs no escapes."""
    code = repr(text)
    return f'"{code[1:-1]}"' if code[0] == "'" and '"' not in code else code


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f"({', '.join(map(_value, value))})" if isinstance(value, tuple) else repr(value)


def _short_name(path: str | Sequence[str]) -> str:
    """Return the last part of the first path, for a docstring."""
    first = path if isinstance(path, str) else path[0]
    name = re.sub(r"[^\w.*=-]", "_", first.rstrip("/").rpartition("/")[2])
    return name if len(name) <= 40 else name[:37] + "..."


_HEAD = '''"""Predicts `{label}` from {data}.

Written by `satrap train`, to be edited. Run it in the folder in which that
command was called, by python or by `satrap run`. It continues after its best
checkpoint, unless it had finished: then it tests only. To start again, remove
the folder RUN, or name another. `satrap report` draws the runs in that folder.
"""

import pathlib
import sys

import satrap
import torch

'''

_SHOWN = ("batch_size", "validate_steps")
_SETTINGS = """RUN = {run}  # folder of checkpoints and, without `satrap run`, of records
BATCH_SIZE = {batch_size}
VALIDATE_STEPS = {validate_steps}  # about one pass over the data
"""

_SOURCE = '''def source({parameters}):
    """Declare the data: where it is and what its columns mean."""
'''

_DENSE = """    dense = [
        satrap.DenseColumn(name, missing=mean{log})
        for name, (mean, _) in NUMBERS.items()
    ]
"""

_MODELS = '''class Net(torch.nn.Module):
    """Adds a weight of each id, the first number of its embedding, to a model.

    Scales the numbers, and drops some embeddings in training.
    """

    def __init__(self, model, embeddings, dropout):
        super().__init__()
        self.model, self.dropout = model, torch.nn.Dropout(dropout)
        first = torch.tensor(embeddings.features.columns)
        self.register_buffer("first", first)
        mean, deviation = torch.tensor(list(NUMBERS.values())).T
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, dense, embeddings):
        numbers = ((dense - self.mean) / self.deviation).clamp(-5, 5)
{missing}        logits = self.model(numbers, self.dropout(embeddings))
        return logits + embeddings[:, self.first].sum(1)


class Logistic(torch.nn.Module):
    """Logistic regression: a weight for each number; Net adds those of ids."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear({num_dense}, 1)

    def forward(self, dense, _):
        return self.linear(dense).squeeze(1)


'''

_MISSING_INPUTS = """        # A missing number reads as the mean; a second input says so.
        is_missing = (dense == self.mean).float()
        numbers = torch.cat([numbers, is_missing], 1)
"""

_MODELS_WITHOUT_NUMBERS = '''class Net(torch.nn.Module):
    """Adds a weight of each id, the first number of its embedding, to a model.

    Drops some embeddings in training.
    """

    def __init__(self, model, embeddings, dropout):
        super().__init__()
        self.model, self.dropout = model, torch.nn.Dropout(dropout)
        first = torch.tensor(embeddings.features.columns)
        self.register_buffer("first", first)

    def forward(self, dense, embeddings):
        logits = self.model(dense, self.dropout(embeddings))
        return logits + embeddings[:, self.first].sum(1)


class Logistic(torch.nn.Module):
    """Logistic regression without numbers: Net adds the weights of ids."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, _, embeddings):
        return self.bias.expand(len(embeddings))


'''

_EMBEDDINGS = '''def embeddings_of(dims, lr):
    """Return the features of ids, each with its table."""
    features = {{}}
    # Large accumulators keep the first steps small, so rare ids learn slowly.
    optimizer = satrap.Adagrad(
        lr=lr, initial_accumulator_value=40 / BATCH_SIZE**2
    )
    for name, dim in dims.items():
        table = satrap.Table(name, dim=dim, optimizer=optimizer)
        features[name] = {table}
    return satrap.Embeddings(features, staleness={staleness}, seed={seed})


'''

_FIT = '''def is_alone(embeddings):
    """Return whether the rows are in this process, not on servers."""
    return isinstance(embeddings.tables, satrap.TableGroup)


def fit(name, net, embeddings, lr, folder):
    """Train until validation gets worse, and return to the best.

    Prints the metrics on test samples, which have no influence on training.
    Returns the log loss of the best validation.
    """
{train}{validate}{test}    trainers = embeddings.trainers  # one, but for `satrap run --trainers`
    is_first = trainers.rank == 0  # it prints, and each trains on its share
    train = train.replace(batch_size=max(1, BATCH_SIZE // trainers.world_size))
    net = embeddings.parallel(net)
    optimizer = embeddings.optimizer(torch.optim.Adam(net.parameters(), lr=lr))
    validation = satrap.Validation(
        net, embeddings, validate, metric="log_loss", patience=2
    )
    run = satrap.Checkpoint(
        f"{{folder}}/checkpoint",
        net,
        optimizer,
        embeddings,
        train,
        keep=1,
        extra_state={{"validation": validation}},
    )
    end = pathlib.Path(folder, "finished")
    is_finished = run.resume() and end.exists()
    if is_finished and is_first:
        print(f"{{name}} had finished; to train it longer, raise epochs or")
        print(f"patience in this script, and remove {{end}}")
    elif is_first:
        print(f"{{name}}:", file=sys.stderr)  # where Progress prints
    with satrap.Progress(
        embeddings,
        None if is_first else [],
        record=folder if is_alone(embeddings) else None,
        {settings},
    ) as progress:
        for batch in [] if is_finished else embeddings.stream(train):
            logits = net(batch.dense, batch.embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, batch.label
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
            validation.step(
                every_steps=VALIDATE_STEPS, progress=progress, checkpoint=run
            )
            if validation.is_over:
                break
        else:
            validation.step(every_steps=1, progress=progress, checkpoint=run)
        if not is_finished:
            run.resume()  # only the best is saved
        embeddings.eval()
        net.eval()
        result = satrap.evaluate(net, embeddings.stream(test))
        auc, log_loss = result.auc(), result.log_loss()
        tested = {{"test AUC": auc, "test log loss": log_loss}}
        progress.report_evaluation(embeddings.step, tested)
    metrics = f"AUC {{auc:.4f}}, log loss {{log_loss:.4f}}"
    rows = sum(map(len, embeddings.tables.values()))
    if is_first:
        steps = f"{{embeddings.step:,}} steps, {{rows:,}} rows"
        print(f"{{name}}: {{metrics}}; {{steps}}")
        end.touch()
    return validation.best


'''

_CHECK = """{condition}        sys.exit(
            "the data is not here: run this script in the folder in which "
            "`satrap train` was called, or correct the paths in it"
        )
"""

_MAIN = '''def main():
    """Train a DCN and a logistic regression, and say which is better.

    On servers it trains the DCN only: they hold the tables of one model.
    """
{check}    torch.manual_seed({seed})
    embeddings = embeddings_of(IDS, lr=0.1)
    dcn = satrap.models.DCN({num_dense}, embeddings, deep=(128, 64))
    losses = {{}}
    net = Net(dcn, embeddings, 0.2)
    losses["DCN"] = fit("DCN", net, embeddings, lr=1e-3, folder=RUN)
    if not is_alone(embeddings):
        return

    name = "logistic regression"
    embeddings = embeddings_of(dict.fromkeys(IDS, 1), lr=0.1)
    net = Net(Logistic(), embeddings, 0.0)
    losses[name] = fit(name, net, embeddings, lr=0.02, folder=f"{{RUN}}/logistic")
    print(f"better in validation: {{min(losses, key=losses.get)}}")


if __name__ == "__main__":
    main()
'''
