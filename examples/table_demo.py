"""Trains two embedding tables on clicks, saves and loads one of them, and updates the copy by its changes alone.

It needs only NumPy and a few seconds. The score of a user and an item is the dot product of their rows; the clicks are
drawn from hidden vectors. Ids are any 64-bit numbers; a row is created when its id first occurs.
"""

import tempfile
from pathlib import Path

import numpy as np

from satrap import Adagrad, Normal, Store, Table

NUM_USERS, NUM_ITEMS, BATCH, STEPS = 2_000, 1_000, 4_096, 1_000
rng = np.random.default_rng(0)
likes = rng.normal(size=(NUM_USERS, 4)) @ rng.normal(size=(4, NUM_ITEMS))  # the hidden scores
user_ids = rng.integers(2**64, size=NUM_USERS, dtype=np.uint64)
item_ids = rng.integers(2**64, size=NUM_ITEMS, dtype=np.uint64)

start = Normal(std=0.1)
users = Store(Table("user", dim=8, optimizer=Adagrad(lr=0.2), initial=start, capacity=1_900, num_buckets=1))
items = Store(Table("item", dim=8, optimizer=Adagrad(lr=0.2), initial=start, dtype="bfloat16"))


def train(steps: int) -> None:
    """Train a logistic regression on the dot product. The tables sum the gradients of ids that a batch repeats."""
    for _ in range(steps):
        user = (NUM_USERS * rng.random(BATCH) ** 3).astype(int)  # some users occur much more often than others
        item = rng.integers(NUM_ITEMS, size=BATCH)
        clicked = rng.random(BATCH) < 1 / (1 + np.exp(-likes[user, item]))
        u, user_ticket = users.lookup_for_update(user_ids[user])
        v, item_ticket = items.lookup_for_update(item_ids[item])
        slope = (1 / (1 + np.exp(-(u * v).sum(axis=1))) - clicked).astype(np.float32)[:, None]
        users.update(user_ticket, slope * v)
        items.update(item_ticket, slope * u)


def accuracy() -> float:
    """Return how often the score has the sign of the hidden score. A lookup without training changes nothing."""
    scores = users.lookup(user_ids, train=False) @ items.lookup(item_ids, train=False).T
    return float(((scores > 0) == (likes > 0)).mean())


print(f"before: {accuracy():.1%} of all pairs right, {len(users):,} users, {len(items):,} items")
train(STEPS)
print(f"after {STEPS} batches: {accuracy():.1%}, {len(users):,} users (the capacity), {len(items):,} items")
with tempfile.TemporaryDirectory() as folder:
    version = items.save(Path(folder, "items"))
    replica = Store.load(Path(folder, "items"))
    train(1)
    items.save_changes(Path(folder, "changes"), since=version)
    replica.apply_changes(Path(folder, "changes"))
same = np.array_equal(replica.read(item_ids).values, items.read(item_ids).values)
print(f"saved, loaded and updated by changes, the copy has the same bits: {same}")
print("users:", ", ".join(f"{name} {count}" for name, count in users.stats().items()))
