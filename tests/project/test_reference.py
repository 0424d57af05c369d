"""docs/reference.md is current, and complete: compared with the running package, not with the list it is made of."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import satrap

DOCS = Path(__file__).parents[2] / "docs"
MODULES = ("models", "negatives", "nn", "synthetic")
NO_ITEMS = {"__version__", *MODULES}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The text of the page below each heading of an item."""
    parts = re.split(r"^### (\w+)$", (DOCS / "reference.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """An object of each class that users get from calls, by a run of three steps: its attributes are those it has."""
    table = satrap.Table("item", dim=2, optimizer=satrap.Adagrad(lr=0.1))
    embeddings = satrap.Embeddings({"item": table, "last": table.sequence(2)})
    inputs = satrap.Inputs(
        names=("item", "last"), values=np.arange(12, dtype=np.uint64), batch_size=6, label=np.zeros(6, np.float32)
    )
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


def undocumented(item: Any, section: str, internal: set[str]) -> list[str]:
    return sorted(
        name
        for name in set(public_members(item))
        if not name.startswith("_") and name not in internal and not is_shown(name, section)
    )


def is_shown(name: str, section: str) -> bool:
    """Whether a section has an attribute, a method, or the name among the inherited ones."""
    inherited = re.search(r"^Inherited: (.*)$", section, re.MULTILINE)
    return (
        re.search(rf"^- `{name}\b", section, re.MULTILINE) is not None
        or re.search(rf"^#### \w+\.{name}$", section, re.MULTILINE) is not None
        or (inherited is not None and f"`{name}`" in inherited[1])
    )


def internal_of(writer: ModuleType, cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in writer.INTERNAL.get(base.__name__, "").split()}


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
    assert (DOCS / "reference.md").read_text() == writer.reference(), "a docstring changed: run `make reference`"


@pytest.mark.parametrize("name", sorted(public_items()))
def test_every_public_name_is_described_with_all_that_its_class_has(
    name: str, writer: ModuleType, sections: dict[str, str]
) -> None:
    item = public_items()[name]
    assert name in sections, f"{name} is public: add it to GROUPS of docs/reference.py"
    if isinstance(item, type):
        assert undocumented(item, sections[name], internal_of(writer, item)) == []


def test_objects_of_a_run_have_no_attribute_that_is_not_described(
    objects: dict[str, Any], writer: ModuleType, sections: dict[str, str]
) -> None:
    for name, item in objects.items():
        assert type(item).__name__ == name
        assert undocumented(item, sections[name], internal_of(writer, type(item))) == [], name


def test_the_classes_that_public_calls_return_are_described(writer: ModuleType, sections: dict[str, str]) -> None:
    """A class of Satrap in the type of a public member has a section, or is internal."""
    known = {*sections, *HIDDEN_TYPES}
    for name in sections:
        for returned in re.findall(r"^(?:\w+\(.*)?\) -> (.+)$", sections[name], re.MULTILINE):
            for each in re.findall(r"\b[A-Z]\w+\b", returned):
                assert each in known or not is_of_satrap(each), f"{name} returns {each}"


HIDDEN_TYPES = {"Batches", "Ticket", "Block", "Seconds"}
"""Types without a public member, or of sources that a user writes."""


def is_of_satrap(name: str) -> bool:
    modules = [module for path, module in list(sys.modules.items()) if path.startswith("satrap")]
    return any(getattr(getattr(each, name, None), "__module__", "").startswith("satrap") for each in modules)


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
    for name, members in writer.INTERNAL.items():
        known = set(dir(classes[name])) | {each.name for each in writer.members_of(classes[name])}
        assert set(members.split()) <= known, name
    assert set(writer.RETURNED) <= set(classes)


def test_every_exception_is_described(sections: dict[str, str]) -> None:
    for name, value in vars(satrap.errors).items():
        if isinstance(value, type):
            assert sections[name].count("\n") >= 3 and f"{value.__doc__}".split()[0] in sections[name]
