"""What a model asks of whoever keeps its KV rows. A model knows sources and groups, no page, slot or location."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class KvState(Protocol):
    """The rows of the tokens of one step, and of everything that came before them.

    A step has T tokens, in an order that the keeper chose: `T` below is exactly the number of tokens given to
    `Model.forward`, in that order. The keeper knows their sessions and positions; the model never tells it. Numbers of
    sources and groups are indices into `KvLayout.sources` and `KvLayout.groups`.

    In every layer the model calls `write_rows`; in the leader of an index group also `write_index_keys` and then
    `select`; and last `read_rows`, a few tokens at a time. A token sees itself and what precedes it in its session, so
    writes must be visible to reads of the same step.
    """

    def write_rows(self, source: int, rows: torch.Tensor) -> None:
        """Keep the rows of this step's tokens: uint8 [T, row_bytes]."""

    def write_index_keys(self, group: int, keys: torch.Tensor) -> None:
        """Keep the index keys of this step's tokens: uint8 [T, key_bytes]."""

    def select(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """Choose each token's rows for all layers of a group.

        The score of a key is sum over heads h of weights[h] * relu(queries[h] . key) (`indexer.index_scores`); the
        weights already carry every scale factor of the model. The `top_k` best visible positions are chosen; ties go
        to the lower position.

        Args:
            queries: float32 [T, heads, head_dim].
            weights: float32 [T, heads].
        """

    def read_rows(self, source: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected rows of some tokens, in a source whose group has been selected in this step.

        The slices of one layer cover the step from its first token to its last, in order. They are short, because rows
        that are gathered and used while they are in the cache cost a third of rows gathered for the whole step.

        Returns:
            uint8 [t, K, row_bytes] and bool [t, K] for t tokens, K being exactly the group's `top_k` for every token,
            so that sums over K never depend on who else is in the step. Attention sums in this order, so a token's
            order must depend on its selection alone. Where the second is False the row must be zero bytes or any row
            ever written (finite numbers): its weight is zero, but zero times NaN is not.
        """


class ModelConfig(Protocol):
    """What everyone may ask of a configuration, whatever the family. `end_ids` are the tokens that end a text."""

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """A loaded model. Its KV layout is `registry.kv_layout(model.config, ...)`."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, state: KvState, logits_of: torch.Tensor
    ) -> torch.Tensor:
        """Run one step.

        A token's result depends on its own session alone: bit for bit the same whatever T, its place in the list and
        the other tokens are.

        Args:
            tokens: int64 [T], T >= 1, any number (padding is the model's own business).
            positions: int64 [T], of each token in its session.
            state: keeper of the rows.
            logits_of: int64 [wanted], indices of the tokens whose logits are wanted; may be empty.

        Returns:
            float32 [wanted, config.vocab_size].
        """
