"""The table optimizer that updates a row exactly as a torch optimizer updates a parameter.

A dense parameter on the servers is a constant initial value plus a row that started at 0. So only options whose effect
does not depend on the value of a parameter have an equivalent: weight decay has none and is refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer
from satrap.errors import ConfigError

_TABLE_OPTIMIZERS: dict[type[torch.optim.Optimizer], type[SGD | Adagrad | Adam | AdamW]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
_REQUIRED = {"weight_decay": 0.0, "dampening": 0.0, "lr_decay": 0.0, "amsgrad": False, "maximize": False}


def table_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """Return the table optimizer for one param group; raise ConfigError if there is none."""
    kind = type(optimizer)
    if kind not in _TABLE_OPTIMIZERS:
        known = ", ".join(each.__name__ for each in _TABLE_OPTIMIZERS)
        raise ConfigError(f"dense='async': tables have no {kind.__name__}; expected one of torch's {known}")
    for name, required in _REQUIRED.items():
        if group.get(name, required) != required:
            raise ConfigError(
                f"dense='async': {kind.__name__} has {name}={group[name]!r}, which tables do not support for dense "
                f"parameters: set {name}={required!r}, or dense='sync'"
            )
    table_kind = _TABLE_OPTIMIZERS[kind]
    return table_kind(**{option.name: _plain(group[option.name]) for option in fields(table_kind)})


def _plain(value: Any) -> Any:
    """Convert tensors to the numbers that they hold, since torch takes both."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value
