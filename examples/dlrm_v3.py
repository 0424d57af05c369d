"""DLRM-v3's streaming recipe: an HSTU ranks 32 candidates of each request, trained window by window in order of time.

The requests are drawn as MLPerf's public generator draws them, with its parameters except the number of items, which
`--items` sets (MLPerf: 1e9) and from which the number of users follows. In each of 100 windows a user makes a request
with probability 0.7. A user likes 4 of 128 categories, each the more the more often it was chosen; new items appear in
every window; which ratings a category gets changes with a period of 8 windows. The model sees what a user did in
earlier windows, and learns which of 32 items of the current one are rated 3.5 or better.

After each window the script prints the normalised entropy (NE) and the AUC on the next one, whose requests it has not
trained on yet. `--run FOLDER` saves a checkpoint after each window and every `--save-every` steps, and resumes from the
newest, in the middle of a window, too. It runs under `satrap run`, with any number of servers and trainers.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import satrap
from satrap.models.hstu import Layer

CATEGORIES, LIKED, CANDIDATES = 128, 4, 32
SAMPLES_PER_ITEM, LENGTH = 50, 100  # so there are ITEMS * 50 / 100 / WINDOWS users
PRESENT = 0.7  # probability that a user makes a request in a window
LARGEST_ALPHA = 500  # a user's categories are drawn with up to this alpha: the larger, the fewer are repeated
STARS, SHARES = [5.0, 4.0, 3.0, 2.0, 1.0], [0.2, 0.25, 0.25, 0.2, 0.1]  # ratings, and the share of items that have each
GOOD = 3.5
ACTIONS = 5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


# -- the requests ------------------------------------------------------------------------------------------------------


@dataclass
class Window:
    """What the users of one window did."""

    users: Ints
    offsets: Ints
    """Where each user's items begin."""
    items: Ints
    ratings: Floats
    candidates: Ints
    """[users, CANDIDATES]: places in `items`."""


@dataclass
class Requests:
    """Draws the windows one after another, from the seed and their numbers, and keeps the users' histories."""

    num_items: int
    num_windows: int
    max_history: int
    seed: int = 0
    window: int = -1
    """The next window; -1: what the users did before the first."""
    num_users: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_users = self.num_items * SAMPLES_PER_ITEM // LENGTH // self.num_windows
        if self.num_users < 1 or self.num_items < CATEGORIES * self.num_windows:
            raise SystemExit(
                f"--items is {self.num_items}; expected at least {CATEGORIES * self.num_windows}: one new item of each "
                f"of {CATEGORIES} categories in each of {self.num_windows} windows"
            )
        draw = np.random.default_rng([self.seed, 0])
        self.stars = draw.choice(STARS, self.num_items, p=SHARES)
        self.liked = draw.permuted(np.tile(np.arange(CATEGORIES), (self.num_users, 1)), axis=1)[:, :LIKED]
        self.chosen = np.zeros((self.num_users, LIKED), np.int64)
        self.history = [np.empty(0, np.int64)] * self.num_users
        self.rated = [np.empty(0)] * self.num_users

    def users_of(self, number: int) -> tuple[Ints, np.random.Generator]:
        """Return the users that make a request in a window, and the generator of its other draws."""
        draw = np.random.default_rng([self.seed, number + 2])
        is_present = draw.random(self.num_users) < (PRESENT if number >= 0 else 1)
        return np.flatnonzero(is_present), draw

    def next_window(self) -> Window:
        """Draw the next window; its items belong to the histories from the call after this one on."""
        number = self.window
        users, draw = self.users_of(number)
        lengths = np.maximum(CANDIDATES + 1, draw.normal(LENGTH, LENGTH // 4, len(users)).round().astype(np.int64))
        offsets = np.append(0, np.cumsum(lengths))
        owner = np.repeat(np.arange(len(users)), lengths)
        alpha, counts = draw.integers(1, LARGEST_ALPHA + 1, (len(users), 1)), self.chosen[users]
        shares = (alpha / LIKED + counts) / (alpha + counts.sum(1, keepdims=True))
        choice = (draw.random((len(owner), 1)) > shares.cumsum(1)[owner, :-1]).sum(1)
        np.add.at(self.chosen, (users[owner], choice), 1)
        per_category = self.num_items // CATEGORIES
        newest = per_category * max(number + 1, 1) // self.num_windows
        items = self.liked[users[owner], choice] * per_category + draw.integers(0, newest, len(owner))
        ratings = (taste(draw, choice, number) + self.stars[items]) / 2
        keys = offsets[:-1, None] + np.array([draw.permutation(n)[:CANDIDATES] for n in lengths]).reshape(
            -1, CANDIDATES
        )
        self.window += 1
        return Window(users, offsets, items, ratings, keys)

    def remember(self, window: Window) -> None:
        """Append what the users of a window did to their histories."""
        for user, begin, end in zip(window.users, window.offsets, window.offsets[1:], strict=False):
            for lists, new in ((self.history, window.items), (self.rated, window.ratings)):
                lists[user] = np.append(lists[user], new[begin:end])[-self.max_history :]

    def batches(self, number: int, batch_size: int) -> Iterator[dict[str, Any]]:
        """Yield the requests of a window as whole batches."""
        while self.window < number:
            self.remember(self.next_window())
        window = self.next_window()
        for begin in range(0, len(window.users) - batch_size + 1, batch_size):
            yield self._batch(window, slice(begin, begin + batch_size), number)
        self.remember(window)

    def _batch(self, window: Window, requests: slice, number: int) -> dict[str, Any]:
        users = window.users[requests]
        past = np.concatenate([self.history[user] for user in users])
        offsets = np.cumsum([0, *(len(self.history[user]) for user in users)])
        places = window.candidates[requests].ravel()
        of_candidates = np.arange(len(users) + 1) * CANDIDATES
        per_category = self.num_items // CATEGORIES
        return {
            "user": users,
            "history": (past, offsets),
            "history_category": (past // per_category, offsets),
            "action": (np.concatenate([self.rated[user] for user in users]).astype(np.int64) - 1, offsets),
            "candidate": (window.items[places], of_candidates),
            "candidate_category": (window.items[places] // per_category, of_candidates),
            "good": ((window.ratings[places] >= GOOD).astype(np.int64), of_candidates),
            "window": np.full(len(users), number),
        }


def taste(draw: np.random.Generator, choice: Ints, number: int) -> Floats:
    """Return the rating of each liked category: by its place among those that the user likes, and by the time."""
    up, later, down = (np.cos((number + shift) * np.pi / 4) / 2 for shift in (0, 2, 4))
    middle = np.maximum(choice - 1, 0.0)  # the first and the second place have almost the same levels
    levels = np.stack([4.5 - middle + up, 4.0 - middle + later, 3.5 - middle + down], 1)
    chances = np.where(choice[:, None] == 0, [0.8, 0.2, 0.0], [0.1, 0.8, 0.1]).cumsum(1)
    level = (draw.random((len(choice), 1)) > chances[:, :-1]).sum(1)
    ratings: Floats = levels[np.arange(len(choice)), level]
    return ratings


# -- the model ---------------------------------------------------------------------------------------------------------


class Ranker(torch.nn.Module):
    """An HSTU over user, history and candidates, in which no candidate sees another, and a score for each of these."""

    def __init__(self, dim: int, max_history: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.action = torch.nn.Embedding(ACTIONS, dim)
        self.length = max_history + 2  # distances, that of the user included
        self.layers = torch.nn.ModuleList(Layer(dim, num_heads, self.length) for _ in range(num_layers))
        self.score = torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.SiLU(), torch.nn.Linear(dim, 1))

    def forward(self, batch: satrap.Batch) -> Tensor:
        """Return a logit for each candidate, [requests * CANDIDATES]."""
        history, candidates = batch["history"], batch["candidate"]
        acted = self.action(history.numbers["action"].long())
        rows = history.values + batch["history_category"].values + acted
        length = history.longest
        is_past = torch.arange(length, device=rows.device) >= length - history.lengths[:, None]  # padding comes first
        past = rows.new_zeros(*is_past.shape, rows.shape[1]).index_put((is_past,), rows)
        asked = (candidates.values + batch["candidate_category"].values).unflatten(0, (len(batch), CANDIDATES))
        states = torch.cat([batch["user"][:, None], past, asked], 1)
        # The user precedes everything by the longest distance, and all candidates are at the place after the history.
        place = torch.cat([torch.tensor([-self.length]), torch.arange(length), torch.full((CANDIDATES,), length)])
        place = place.to(rows.device)
        distance = (place[:, None] - place).clamp(0, self.length - 1)
        visible = (place[:, None] > place) | torch.eye(len(place), dtype=torch.bool, device=rows.device)
        always = is_past.new_ones(len(batch), 1)
        is_row = torch.cat([always, is_past, always.expand(-1, CANDIDATES)], 1)
        share = (visible & is_row[:, None])[:, None] / (1 + history.lengths)[:, None, None, None]
        for layer in self.layers:
            states = layer(states, distance, share)
        logits: Tensor = self.score(states[:, -CANDIDATES:])
        return logits.flatten()


def label(batch: satrap.Batch) -> Tensor:
    """Return whether each candidate is rated well."""
    good: Tensor = batch["candidate"].numbers["good"]
    return good.float()


def features(dim: int, max_history: int, lr: float) -> dict[str, Any]:
    """Return the features of a request: DLRM-v3's three tables."""
    item, category, user = (
        satrap.Table(name, dim=dim, optimizer=satrap.RowWiseAdagrad(lr=lr)) for name in ("item", "category", "user")
    )
    return {
        "user": user,
        "history": item.sequence(max_history, jagged=True),
        "history_category": category.sequence(max_history, jagged=True, aligned_with="history"),
        "candidate": item.sequence(),
        "candidate_category": category.sequence(aligned_with="candidate"),
    }


# -- training ----------------------------------------------------------------------------------------------------------


class Recipe:
    """The requests of a run as sources: all windows in order to train on, and the window to evaluate on."""

    def __init__(self, args: argparse.Namespace, world_size: int) -> None:
        self.args, self.world_size = args, world_size
        self.evaluated, self._evaluating = 0, self._requests()
        ids = {
            "history": satrap.IdColumn(numbers="action"),
            "candidate": satrap.IdColumn(numbers="good"),
        }
        self.train = satrap.IterableSource(self._items, offsets=True, ids=ids, extra="window")
        self.following = satrap.IterableSource(self._following, ids=ids)

    def _requests(self) -> Requests:
        return Requests(self.args.items, self.args.windows, self.args.history, self.args.seed)

    def _items(self, offset: list[int] | None) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Yield the batches to train on from an offset on: [window, batches of it that were read]."""
        first, num_read = offset or [0, 0]
        requests = self._requests()
        for window in range(first, self.args.windows - 1):
            batches = list(requests.batches(window, self.args.batch_size))
            # as many for each trainer, so that all of them evaluate and save after the same step
            for number in range(num_read, len(batches) // self.world_size * self.world_size):
                yield batches[number], [window, number + 1]
            num_read = 0

    def _following(self) -> Iterator[dict[str, Any]]:
        if self._evaluating.window > self.evaluated:
            self._evaluating = self._requests()
        return self._evaluating.batches(self.evaluated, self.args.batch_size)

    def steps(self, window: int) -> int:
        """Return the number of steps of a window."""
        num_requests = len(self._evaluating.users_of(window)[0])
        return num_requests // int(self.args.batch_size) // self.world_size


def main() -> None:
    """Train on the windows in order, and evaluate on the next one after each."""
    args = arguments()
    torch.manual_seed(args.seed)
    embeddings = satrap.Embeddings(features(args.dim, args.history, args.lr), staleness=args.staleness, seed=args.seed)
    recipe = Recipe(args, embeddings.trainers.world_size)
    network = Ranker(args.dim, args.history, args.layers, args.heads)
    model = embeddings.parallel(network)
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    validation = satrap.Validation(
        model, embeddings, recipe.following, metric="normalised_entropy", score=network, label=label
    )
    is_first = embeddings.trainers.rank == 0
    run = satrap.Checkpoint(args.run, model, optimizer, embeddings, recipe.train, full_every=10) if args.run else None
    if run is not None and run.resume() and is_first:
        print(f"continues after step {embeddings.step:,}", flush=True)

    ends = np.cumsum([recipe.steps(window) for window in range(args.windows - 1)]).tolist()
    for batch in embeddings.stream(recipe.train):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), label(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window = int(batch.inputs.extra["window"][0].as_py())
        if batch.step == ends[window]:
            recipe.evaluated = window + 1
            validation.step()
            if is_first:
                metrics = validation.metrics
                ne, auc = metrics["normalised_entropy"], metrics["auc"]
                print(f"window {window + 1}: NE {ne:.4f} AUC {auc:.4f}", flush=True)
        if run is not None:
            run.save(every_steps=1 if batch.step == ends[window] else args.save_every)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--history", type=int, default=512, help="last items of a history that the model sees")
    parser.add_argument("--batch-size", type=int, default=64, help="requests in a batch of each trainer")
    parser.add_argument("--dim", type=int, default=64, help="of the rows and the layers (MLPerf: 512)")
    parser.add_argument("--layers", type=int, default=2, help="of the HSTU (MLPerf: 5)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of the tables")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", help="folder or URL for checkpoints")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints in a window")
    return parser.parse_args()


if __name__ == "__main__":
    main()
