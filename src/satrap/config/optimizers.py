"""Declarations of the optimizers of a table's rows: frozen dataclasses that check themselves, as `tables` describes."""

from dataclasses import KW_ONLY, dataclass

from satrap.config.validation import (
    LARGEST_FLOAT32,
    Config,
    check_flag,
    check_number,
    check_numbers,
    describe,
    set_field,
)
from satrap.errors import ConfigError

SMALLEST_FTRL_LR = 1.1754943508222875e-38
"""The smallest normal float32: Ftrl divides by lr."""


@dataclass(frozen=True, slots=True)
class SGD(Config):
    """Stochastic gradient descent, with torch's momentum and Nesterov momentum, without its `dampening` and `maximize`.

    lr: learning rate; `Store.set_lr` and `update(lr=...)` override it.
    momentum: momentum factor; 0 keeps no state. The buffer of a row moves only in steps in which it has a gradient.
    nesterov: Nesterov's form of momentum; needs `momentum` > 0.
    weight_decay: L2 penalty, added to the gradient: only rows that have one decay.
    """

    lr: float = 0.01
    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, momentum=0.0, weight_decay=0.0)
        set_field(self, "nesterov", check_flag("SGD", "nesterov", self.nesterov))
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError(
                "SGD: nesterov is True and momentum is 0; Nesterov's form needs momentum > 0: "
                "give momentum (e.g. 0.9) or nesterov=False"
            )


@dataclass(frozen=True, slots=True)
class Adagrad(Config):
    """Adagrad: one accumulator per element. Of torch's parameters `lr_decay` and `maximize` are left out.

    lr: learning rate; `Store.set_lr` and `update(lr=...)` override it.
    weight_decay: L2 penalty, added to the gradient: only rows that have one decay.
    initial_accumulator_value: what the accumulators of a new row start from.
    eps: added to the root of the accumulator. With 0, as in torch, a gradient of 0 on an accumulator of 0 gives NaN.
    """

    lr: float = 0.01
    _: KW_ONLY
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=0.0)


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(Config):
    """Adagrad with one accumulator per row, the mean of the squared gradient, as FBGEMM defines it.

    lr: learning rate; `Store.set_lr` and `update(lr=...)` override it.
    weight_decay: L2 penalty, added to the gradient: only rows that have one decay.
    initial_accumulator_value: what the accumulator of a new row starts from.
    eps: added to the root of the accumulator. With 0 a gradient of 0 on an accumulator of 0 gives NaN.
    """

    lr: float = 0.01
    _: KW_ONLY
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=0.0)


@dataclass(frozen=True, slots=True)
class Adam(Config):
    """Adam. Every row counts its own steps, those in which it has a gradient, so bias correction is per row.
    Of torch's parameters `amsgrad` and `maximize` are left out.

    lr: learning rate; `Store.set_lr` and `update(lr=...)` override it.
    betas: decay of the running means of the gradient and of its square; each in [0, 1).
    eps: added to the denominator. With 0, as in torch, a row whose gradients were all 0 becomes NaN.
    weight_decay: L2 penalty, added to the gradient: only rows that have one decay.
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, eps=0.0, weight_decay=0.0)
        set_field(self, "betas", _betas("Adam", self.betas))


@dataclass(frozen=True, slots=True)
class AdamW(Config):
    """Adam with decoupled weight decay; every row counts its own steps, those in which it has a gradient. Of torch's
    parameters `amsgrad` and `maximize` are left out.

    lr: learning rate; `Store.set_lr` and `update(lr=...)` override it.
    betas: decay of the running means of the gradient and of its square; each in [0, 1).
    eps: added to the denominator. With 0, as in torch, a row whose gradients were all 0 becomes NaN.
    weight_decay: the row shrinks by lr * weight_decay of itself in each of its steps, and in no other.
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, eps=0.0, weight_decay=0.0)
        set_field(self, "betas", _betas("AdamW", self.betas))


@dataclass(frozen=True, slots=True)
class Ftrl(Config):
    """FTRL-Proximal (McMahan et al., 2013), per coordinate. z starts where the closed form gives the initial value, for
    this `lr`: the first update of a row after the lr has changed moves it by that difference as well.

    lr: the paper's alpha; > 0, because the formula divides by it.
    beta: the paper's beta; together with `l2` > 0, because a new row's denominator is beta / lr + l2.
    l1: L1 strength: elements whose |z| stays within it are exactly 0.
    l2: L2 strength.
    """

    lr: float = 0.05
    _: KW_ONLY
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, lr=0.0, beta=0.0, l1=0.0, l2=0.0)
        if self.lr < SMALLEST_FTRL_LR:
            raise ConfigError(
                f"Ftrl: lr is {self.lr:g}; expected > 0, at least {SMALLEST_FTRL_LR:.3g}, because the formula divides "
                "by it: give e.g. lr=0.05"
            )
        if self.beta / self.lr + self.l2 > LARGEST_FLOAT32:
            raise ConfigError(
                f"Ftrl: beta / lr + l2 is {self.beta / self.lr + self.l2:g}, which float32 cannot hold: give a larger "
                "lr, or a smaller beta or l2"
            )
        if self.beta == 0.0 and self.l2 == 0.0:
            raise ConfigError(
                "Ftrl: beta and l2 are both 0, so a new row divides by 0: give one of them, e.g. beta=1.0"
            )


Optimizer = SGD | Adagrad | RowWiseAdagrad | Adam | AdamW | Ftrl


def _betas(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{where}: betas is {describe(value)}; expected two numbers, e.g. (0.9, 0.999)")
    first, second = (check_number(where, f"betas[{position}]", beta, 0.0) for position, beta in enumerate(value))
    if first >= 1.0 or second >= 1.0:
        raise ConfigError(f"{where}: betas is {describe(value)}; expected each in [0, 1), e.g. (0.9, 0.999)")
    return first, second
