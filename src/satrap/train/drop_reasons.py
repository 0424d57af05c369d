"""Why a stream has dropped a batch or returns none, for its errors. Texts only."""

NO_LOADER = (
    "a torch DataLoader cannot read a stream: its batches are complete, and their gradients return to this "
    "process; use embeddings.stream(satrap.IterableSource(loader)) and iterate over the stream itself"
)
DROP_REASONS = {
    "zero_grad": "zero_grad() cleared its gradients before optimizer.step()",
    "overflow": "a GradScaler found an overflow and skipped its step",
}
"""By cause."""


def why_not_yet(step: int, open_step: int, staleness: int, *, has_gradient: bool) -> str:
    """Return why the batch of `step` cannot be used while the loop still uses that of `open_step`."""
    what, drop = ("a loss reached", "zero_grad()") if has_gradient else ("the loop used", "deleting it")
    return (
        f"step {step}: its batch cannot be used yet: {what} the batch of step {open_step} and optimizer.step() was not "
        f"called, and the staleness is {staleness}; call step() of the optimizer that embeddings.optimizer() returned "
        f"before using the next batch, or drop the earlier one by {drop}, or set Embeddings(staleness="
        f"{step - open_step}), or stream(accumulate=N) to step once for N batches"
    )


def why_passed(step: int, open_step: int, staleness: int) -> str:
    """Return why the batch of `open_step` was dropped when that of `step` was used."""
    return (
        f"the batch of step {step} was used before this one was stepped, and the staleness is {staleness}: call "
        f"backward() and optimizer.step() before using the next batch, or set Embeddings(staleness={step - open_step})"
    )
