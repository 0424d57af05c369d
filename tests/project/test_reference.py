"""docs/reference/ is current, and complete: compared with the running package, not with the list it is made of."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import satrap

DOCS = Path(__file__).parents[2] / "docs"
MODULES = ("models", "negatives", "nn", "synthetic")
FORMS = {"to_dict", "from_dict"}
"""Public, and described by an introduction alone."""
NO_ITEMS = {"__version__", *MODULES}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # for docs/declared.py
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The text below each heading of an item, of all pages."""
    texts: dict[str, str] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        parts = re.split(r"^### (\w+)$", page.read_text(), flags=re.MULTILINE)
        texts |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return texts


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """An object of each class that users get from calls, by a run of three steps: its attributes are those it has."""
    table = satrap.Table("item", dim=2, optimizer=satrap.Adagrad(lr=0.1))
    embeddings = satrap.Embeddings({"item": table, "last": table.sequence(2), "all": table.sequence()})
    ids, label = np.arange(18, dtype=np.uint64), np.zeros(6, np.float32)
    inputs = satrap.Inputs(names=("item", "last", "all"), values=ids, batch_size=6, label=label)
    model = torch.nn.Linear(2, 1)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    stream = embeddings.stream([inputs, inputs])
    for batch in stream:
        model(batch.embeddings).sum().backward()
        optimizer.step()
    counters = embeddings.counters()
    embeddings.eval()
    found = {
        "Batch": batch,
        "Sequence": batch["last"],
        "JaggedSequence": batch["all"],
        "Counters": counters,
        "Embeddings": embeddings,
        "Evaluation": satrap.evaluate(model, embeddings.stream([inputs]), score=lambda batch: torch.zeros(6)),
        "Features": embeddings.features,
        "HybridOptimizer": optimizer,
        "ProcessGroup": embeddings.trainers,
        "Stream": stream,
        "TableGroup": embeddings.tables,
        "Store": embeddings.tables["item"],
        "StoredRows": embeddings.tables["item"].read(np.arange(1)),
        "Feature": table.sequence(2),
        "Table": table,
        "Parquet": satrap.Parquet("none"),
    }
    embeddings.close()
    return found


def public_members(item: Any) -> Iterator[str]:
    """The public names that an object, or a class, has from classes of Satrap."""
    cls = item if isinstance(item, type) else type(item)
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "satrap":
            yield from vars(base)
    if cls is not item:
        slots = [name for base in cls.__mro__ for name in getattr(base, "__slots__", ())]
        own = set(getattr(item, "__dict__", {})) | {name for name in slots if hasattr(item, name)}
        yield from own - _attributes_of_torch(item)


def _attributes_of_torch(item: Any) -> set[str]:
    """What torch sets on each of its objects."""
    if isinstance(item, torch.nn.Module):
        return set(vars(torch.nn.Module()))
    if isinstance(item, torch.optim.Optimizer):
        return set(vars(torch.optim.SGD([torch.zeros(1)])))
    return set()


def undocumented(item: Any, sections: dict[str, str], internal: set[str]) -> list[str]:
    """The public members of an object that neither its section shows nor those of the classes that it extends."""
    cls = item if isinstance(item, type) else type(item)
    shown = [sections[base.__name__] for base in cls.__mro__ if base.__name__ in sections]
    return sorted(
        name
        for name in set(public_members(item))
        if not name.startswith("_") and name not in internal and not any(is_shown(name, section) for section in shown)
    )


def is_shown(name: str, section: str) -> bool:
    """Whether a section has an argument, an attribute or a method of this name."""
    return re.search(rf"^(- `{name}\b|#### \w+\.{name}$)", section, re.MULTILINE) is not None


def internal_of(writer: ModuleType, cls: type) -> set[str]:
    names: set[str] = writer.hidden_of(cls)
    return names


def public_items() -> dict[str, Any]:
    found = {name: getattr(satrap, name) for name in satrap.__all__ if name not in NO_ITEMS}
    found |= {name: getattr(module, name) for module in (satrap.models, satrap.nn) for name in module.__all__}
    synthetic = vars(satrap.synthetic).items()
    return found | {
        name: value
        for name, value in synthetic
        if not name.startswith("_") and inspect.isclass(value) and value.__module__ == satrap.synthetic.__name__
    }


def test_the_reference_is_current(writer: ModuleType) -> None:
    pages = {page.name: page.read_text() for page in (DOCS / "reference").iterdir()}
    assert pages == writer.pages(), "a docstring changed: run `make reference`"


def test_what_is_described_can_be_imported(writer: ModuleType) -> None:
    """From `satrap`, or from one of its public modules."""
    public = public_items()
    negatives = {name: getattr(satrap.negatives, name) for name in ("in_batch", "Counts", "Draws", "add")}
    assert writer.documented() == {
        name: value for name, value in (public | negatives).items() if not is_an_error(value)
    }


def is_an_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, satrap.SatrapError)


@pytest.mark.parametrize("name", sorted(public_items()))
def test_every_public_name_is_described_with_all_that_its_class_has(
    name: str, writer: ModuleType, sections: dict[str, str]
) -> None:
    item = public_items()[name]
    assert name in sections, f"{name} is public: add it to GROUPS of docs/reference.py"
    if isinstance(item, type):
        assert undocumented(item, sections, internal_of(writer, item)) == []


def test_objects_of_a_run_have_no_attribute_that_is_not_described(
    objects: dict[str, Any], writer: ModuleType, sections: dict[str, str]
) -> None:
    for name, item in objects.items():
        assert type(item).__name__ == name
        assert undocumented(item, sections, internal_of(writer, type(item))) == [], name
        hidden = internal_of(writer, type(item)) - FORMS
        assert not hidden & set(dir(item)), f"completion shows internal members of {name}"


def test_the_classes_that_public_calls_return_are_described(writer: ModuleType, sections: dict[str, str]) -> None:
    """A class of Satrap in a signature or the type of a public member has a section, or has no public member."""
    known = {*sections, *HIDDEN_TYPES}
    for name, section in sections.items():
        shown = re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        shown += re.findall(r"^- `(.+?)`", section, re.MULTILINE)
        for word in re.findall(r"(?<![\w.])_?[A-Z]\w+\b", "\n".join(shown)):
            assert word in known or not is_of_satrap(word), f"{name} names {word}"
            assert not word.startswith("_"), f"{name} shows {word}, which is private"


HIDDEN_TYPES = {"Ticket", "Block"}
"""Types without a public member."""


def is_of_satrap(name: str) -> bool:
    return name in names_of_satrap()


@cache
def names_of_satrap() -> set[str]:
    """The names, in any module of Satrap, of what is defined in one of them."""
    values = [
        one for path, module in list(sys.modules.items()) if path.startswith("satrap") for one in vars(module).items()
    ]
    return {name for name, value in values if str(getattr(value, "__module__", "")).startswith("satrap")}


def test_a_signature_names_types_and_defaults(sections: dict[str, str]) -> None:
    call = re.search(r"```py\n(Embeddings\(.*?)```", sections["Embeddings"], re.DOTALL)
    assert call is not None
    for text in (
        "features: Mapping[str, Feature | Table],",
        "staleness: int = 0,",
        "Literal['sync', 'async']",
    ):
        assert text in call[1]
    assert "- `step: int`" in sections["Embeddings"] and "- `dense: Tensor`" in sections["Batch"]


def test_every_member_that_is_left_out_exists(writer: ModuleType) -> None:
    classes = writer.documented()
    bases = {base.__name__: base for cls in classes.values() if isinstance(cls, type) for base in cls.__mro__}
    for name, base in bases.items():
        members = (*writer.INTERNAL.get(name, "").split(), *vars(base).get("_internal", ()))
        if members:
            known = set(dir(base)) | {member.name for member in writer.members_of(base)}
            assert set(members) <= known | set(inspect.signature(base).parameters), name
    assert set(writer.INTERNAL) <= set(bases)
    assert set(writer.RETURNED) <= set(classes)


def test_every_exception_is_described(writer: ModuleType, sections: dict[str, str]) -> None:
    for name, value in vars(satrap.errors).items():
        if isinstance(value, type) and name not in writer.INTERNAL_ERRORS:
            assert sections[name].count("\n") >= 3 and f"{value.__doc__}".split()[0] in sections[name]
