"""Models written for plain torch train after `satrap.convert` as before it, with their code unchanged: from the same
rows the losses of both are equal to 1e-6. Each model looks rows up in another way: two towers that share a table, a GRU
over padded sequences with a loss over sampled items, a graph that propagates all rows, a cross network with bags."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

import satrap
from module_jobs import PLACES, minimize, placed

USERS, ITEMS, DIM, SIZE, STEPS = 40, 60, 8, 16, 8


class TwoTowers(nn.Module):
    """Users and items in towers; the user's tower also has the items that were seen, from the same Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.user_emb = nn.Embedding(USERS, DIM)
        self.seen = nn.EmbeddingBag(ITEMS, DIM, mode="mean", padding_idx=0, _weight=self.item_emb.weight.detach())
        self.seen.weight = self.item_emb.weight  # tied
        self.user_tower = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.item_tower = nn.Linear(DIM, DIM)

    def forward(self, user: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        towers = (
            self.user_tower(torch.cat([self.user_emb(user), self.seen(seen)], 1)),
            self.item_tower(self.item_emb(item)),
        )
        scores = towers[0] @ towers[1].T
        loss: Tensor = cross_entropy(scores, torch.arange(len(user)))
        return loss


class GRU4Rec(nn.Module):
    """The next item of a session; positives and sampled negatives come from the Embedding of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, _: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        hidden, _ = self.gru(self.item_emb(seen[:, :-1]))
        positive, negative = self.item_emb(seen[:, 1:]), self.item_emb(item)[:, None]
        margins = (hidden * (positive - negative)).sum(-1)
        is_item = (seen[:, 1:] != 0).float()
        loss: Tensor = -(logsigmoid(margins) * is_item).sum() / is_item.sum()
        return loss


class LightGCN(nn.Module):
    """Propagates the rows of all users and items over their graph in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.user_emb, self.item_emb = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        graph = (torch.rand(USERS, ITEMS, generator=torch.Generator().manual_seed(1)) < 0.2).float()
        self.graph = graph / (graph.sum(1, keepdim=True).sqrt() * graph.sum(0).sqrt() + 1e-6)

    def forward(self, user: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        users, items = self.user_emb(torch.arange(USERS)), self.item_emb(torch.arange(ITEMS))
        all_users, all_items = [users], [items]
        for _ in range(2):
            users, items = self.graph @ items, self.graph.T @ users
            all_users.append(users)
            all_items.append(items)
        users, items = torch.stack(all_users).mean(0), torch.stack(all_items).mean(0)
        margins = (users[user] * (items[seen[:, 0]] - items[item])).sum(1)
        loss: Tensor = -logsigmoid(margins).mean() + 1e-3 * self.user_emb(user).pow(2).mean()
        return loss


class DCNv2(nn.Module):
    """Crosses the rows of several columns, which are in a ModuleDict, with those of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleDict({"user": nn.Embedding(USERS, DIM), "item": nn.Embedding(ITEMS, DIM)})
        self.history = nn.EmbeddingBag(ITEMS, DIM, mode="sum")
        self.cross = nn.ModuleList(nn.Linear(3 * DIM, 3 * DIM) for _ in range(2))
        self.head = nn.Linear(3 * DIM, 1)

    def forward(self, user: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        flat, offsets = seen.reshape(-1), torch.arange(0, seen.numel(), seen.shape[1])
        bags = self.history(flat, offsets, torch.full(flat.shape, 0.25))
        rows = torch.cat([self.columns["user"](user), self.columns["item"](item), bags], 1)
        crossed = rows
        for layer in self.cross:
            crossed = rows * layer(crossed) + crossed
        return binary_cross_entropy_with_logits(self.head(crossed).squeeze(1), (user % 2).float())


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    seen = torch.randint(1, ITEMS, (SIZE, 6), generator=generator)
    seen[torch.arange(6) >= torch.randint(2, 7, (SIZE, 1), generator=generator)] = 0  # padding
    return (
        torch.randint(0, USERS, (SIZE,), generator=generator),
        seen,
        torch.randint(1, ITEMS, (SIZE,), generator=generator),
    )


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [TwoTowers, GRU4Rec, LightGCN, DCNv2])
def test_a_converted_model_has_the_losses_of_plain_torch(kind: Callable[[], Any], where: str) -> None:
    torch.manual_seed(0)
    plain = kind()
    own = copy.deepcopy(plain)
    of_torch = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    with placed(where) as place:
        embeddings = satrap.convert(own, satrap.Adagrad(lr=0.1), weights=True, **place)
        with embeddings:
            dense = list(own.parameters())
            optimizer = embeddings.optimizer(torch.optim.Adagrad(dense, lr=0.1) if dense else None)
            losses = minimize([optimizer], lambda step: own(*batch(step)), STEPS)
            expected = minimize([of_torch], lambda step: plain(*batch(step)), STEPS)
            assert losses == pytest.approx(expected, rel=0, abs=1e-6) and losses[-1] != losses[0]
            assert embeddings.step == STEPS and not embeddings.counters().lost
            with torch.no_grad():
                assert own.eval()(*batch(STEPS)).item() == pytest.approx(plain.eval()(*batch(STEPS)).item(), abs=1e-5)
