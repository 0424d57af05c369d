"""Why a stream has dropped a batch, returns none or takes no step, for its errors. Texts only."""

NO_LOADER = (
    "a torch DataLoader cannot read a stream: its batches are complete, and their gradients return to this "
    "process; use embeddings.stream(satrap.IterableSource(loader)) and iterate over the stream itself"
)
ENDED = (
    "this stream has ended, and a stream is one pass over its data: start another one with embeddings.stream(...), or "
    "set epochs=... in the source"
)
UNSTEPPED = (
    "the stream has ended, and optimizer.step() has not taken its last batches (%d, of %d in a step): they are not "
    "trained on unless you call it now. A loop that calls it after each batch whose completes_step is True leaves none"
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


def why_twice(step: int) -> str:
    """Return why a step that was stepped with some of its batches cannot be stepped with others."""
    return (
        f"step {step} was already stepped with some of its batches; call optimizer.step() once for all of them, after "
        "the backward pass of each"
    )


def why_too_early(step: int, num_batches: int, accumulate: int) -> str:
    """Return why a step cannot be stepped before all of its batches were returned."""
    return (
        f"step {step}: optimizer.step() after {num_batches} of {accumulate} batches; call it after each batch whose "
        "completes_step is True, or change stream(accumulate=...)"
    )


def why_no_length(error: TypeError) -> str:
    """Return why a stream has no length. error: that of its source."""
    return (
        f"the length of this stream is not known: {error} (a torch DataLoader needs it, but cannot read a stream: use "
        "embeddings.stream(satrap.IterableSource(loader)))"
    )
