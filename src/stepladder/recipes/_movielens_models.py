"""The three models of recipe movielens.

All of them score all items of some users, `model(users, rated)`. NeuMF and RatingModel also score
pairs of a user and an item, `model.score_pairs(users, items)`.

"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepladder.data.movielens.ratings import compute_biases

EASE_WEIGHT = 6.0  # of EASE's scores in the hybrid's; chosen on the validation split


class MatrixFactorization(nn.Module):
    """Scores p_u q_i + b_u + b_i; with `weights`, plus the weights of the user's items.

    Gradients are dense: Adam changes every row anyway, and a sparse all-reduce of gloo costs more
    than these 7.6 MB.
    """

    popularity: Tensor
    weights: Tensor | None

    def __init__(
        self, num_users: int, factors: int, popularity: Tensor, weights: Tensor | None = None
    ) -> None:
        """Make the model.

        Args:
            num_users: The number of users.
            factors: The length of each vector p_u and q_i.
            popularity: The number of users that rated each item, shape (items,).
            weights: Weights of EASE, shape (items, items), for the hybrid.
        """
        super().__init__()
        num_items = len(popularity)
        self.users = nn.Embedding(num_users, factors)
        self.items = nn.Embedding(num_items, factors)
        self.user_bias = nn.Embedding(num_users, 1)
        self.item_bias = nn.Parameter(torch.zeros(num_items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)
        # Both are computed from the data, so they are not saved.
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("popularity", popularity, persistent=False)

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        """Return the scores of all items, shape (users, items).

        Args:
            users: Shape (users,).
            rated: 1 where the user rated the item in training, shape (users, items).
        """
        scores = self.users(users) @ self.items.weight.T + self.item_bias + self.user_bias(users)
        if self.weights is None:
            return scores
        return scores + EASE_WEIGHT * (rated.float() @ self.weights)


class NeuMF(nn.Module):
    """Neural matrix factorization (He et al., WWW 2017), without pre-training.

    It joins generalized matrix factorization and an MLP of three layers by one linear layer.
    """

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__()
        width = 4 * factors
        self.num_items = num_items
        self.gmf_users = nn.Embedding(num_users, factors)
        self.gmf_items = nn.Embedding(num_items, factors)
        self.mlp_users = nn.Embedding(num_users, width)
        self.mlp_items = nn.Embedding(num_items, width)
        for table in (self.gmf_users, self.gmf_items, self.mlp_users, self.mlp_items):
            nn.init.normal_(table.weight, std=0.01)
        self.first = nn.Linear(2 * width, width)
        self.rest = nn.Sequential(
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, factors),
            nn.ReLU(),
        )
        self.out = nn.Linear(2 * factors, 1)

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the scores of n pairs of a user and an item, shape (n,)."""
        mlp_inputs = torch.cat([self.mlp_users(users), self.mlp_items(items)], 1)
        mlp = self.rest(self.first(mlp_inputs))
        gmf = self.gmf_users(users) * self.gmf_items(items)
        return self.out(torch.cat([gmf, mlp], 1)).squeeze(1)

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        """Return the scores of all items, shape (users, items).

        The first layer is a sum of a user's part and an item's part. Each is computed once per user
        and once per item, not once per pair.
        """
        user_weight, item_weight = self.first.weight.split(self.mlp_users.embedding_dim, 1)
        user_parts = self.mlp_users(users) @ user_weight.T + self.first.bias
        item_parts = self.mlp_items.weight @ item_weight.T
        gmf_weight, mlp_weight = self.out.weight[0].split(self.gmf_users.embedding_dim)
        gmf_scores = (self.gmf_users(users) * gmf_weight) @ self.gmf_items.weight.T
        # One user at a time: 3706 x 64 floats stay in the processor's cache.
        mlp_scores = [self.rest(part + item_parts) @ mlp_weight for part in user_parts]
        return gmf_scores + torch.stack(mlp_scores) + self.out.bias


class RatingModel(nn.Module):
    """Predicts stars as mean + b_u + b_i + p_u q_i.

    The vectors of a user or an item without a training rating are zero.
    """

    mean: Tensor

    def __init__(
        self,
        num_users: int,
        num_items: int,
        factors: int,
        users: Tensor,
        items: Tensor,
        stars: Tensor,
    ) -> None:
        """Make the model.

        Args:
            num_users: The number of users.
            num_items: The number of items.
            factors: The length of each vector p_u and q_i.
            users: The users of the training ratings, shape (n,).
            items: The items of the training ratings, shape (n,).
            stars: The training ratings, shape (n,), from which the biases start.
        """
        super().__init__()
        self.users = nn.Embedding(num_users, factors)
        self.items = nn.Embedding(num_items, factors)
        mean, user_bias, item_bias = compute_biases(
            num_users, num_items, users.numpy(), items.numpy(), stars.numpy()
        )
        self.user_bias = nn.Parameter(torch.from_numpy(user_bias).float())
        self.item_bias = nn.Parameter(torch.from_numpy(item_bias).float())
        self.register_buffer("mean", torch.tensor(mean))
        for table, index in ((self.users, users), (self.items, items)):
            nn.init.normal_(table.weight, std=0.05)
            is_unrated = torch.bincount(index, minlength=len(table.weight)) == 0
            table.weight.data[is_unrated] = 0

    def score_pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the stars of n pairs of a user and an item, shape (n,)."""
        product = (self.users(users) * self.items(items)).sum(1)
        return self.mean + self.user_bias[users] + self.item_bias[items] + product

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        """Return the stars of all items, shape (users, items); `rated` is not used."""
        biases = self.mean + self.user_bias[users][:, None] + self.item_bias
        return biases + self.users(users) @ self.items.weight.T
