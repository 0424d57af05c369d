"""The table optimizer that does to a row what a torch optimizer does to a parameter.

A dense parameter on the servers is a start that never changes plus a row that began at 0. So only what does not depend
on where a parameter lies has a twin: weight decay does, and is refused. Decides and does nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch

from satrap.config.tables import SGD, Adagrad, Adam, AdamW, Optimizer
from satrap.errors import ConfigError

_TWINS: dict[type[torch.optim.Optimizer], tuple[type[SGD | Adagrad | Adam | AdamW], tuple[str, ...]]] = {
    torch.optim.SGD: (SGD, ("lr", "momentum", "nesterov")),
    torch.optim.Adagrad: (Adagrad, ("lr", "initial_accumulator_value", "eps")),
    torch.optim.Adam: (Adam, ("lr", "betas", "eps")),
    torch.optim.AdamW: (AdamW, ("lr", "betas", "eps")),
}
_MUST_BE = {"weight_decay": 0.0, "dampening": 0.0, "lr_decay": 0.0, "amsgrad": False, "maximize": False}


def twin(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """Of one param group; ConfigError if there is none."""
    kind = type(optimizer)
    if kind not in _TWINS:
        known = ", ".join(each.__name__ for each in _TWINS)
        raise ConfigError(f"dense='async': {kind.__name__} is no optimizer of a table; wanted one of torch's {known}")
    for name, wanted in _MUST_BE.items():
        if group.get(name, wanted) != wanted:
            raise ConfigError(
                f"dense='async': {kind.__name__} has {name}={group[name]!r}, which a table cannot do to dense "
                f"parameters: give {name}={wanted!r}, or dense='sync'"
            )
    made, names = _TWINS[kind]
    options = {name: _plain(group[name]) for name in names}
    return made(**options, weight_decay=0.0)


def _plain(value: Any) -> Any:
    """torch takes tensors for numbers."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value
