"""Interface of every decoder to training, checkpoints, validation and people.

Shape suffixes: B batch, T tokens of a sample, N all tokens of a batch, D model width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice, takewhile
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.core.errors import ConfigError, DataError
from forge.core.models.base import Model
from forge.trainer.documents import Documents
from forge.trainer.loss import linear_cross_entropy


class OutputLayer(nn.Linear):
    """The output layer: from the last hidden states to logits, or straight to the loss."""

    def forward(
        self, x_BTD: Tensor, targets_BT: Tensor | None = None, compiled: bool = False
    ) -> Tensor:
        """Give logits or the loss as Decoder.forward does. compiled: of linear_cross_entropy."""
        return _logits_or_loss(x_BTD, self.weight, targets_BT, compiled)


def _logits_or_loss(
    x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, compiled: bool
) -> Tensor:
    if targets_BT is None:
        return F.linear(x_BTD, weight_VD)
    hidden_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    return linear_cross_entropy(hidden_ND, weight_VD, targets_N, compiled=compiled)


class Decoder(nn.Module):
    """The language model, without memory for its weights: `to_empty` gives it some, and
    initialize.initialize or a checkpoint the values.

    Parameters have the names that they have in files of transformers. With tied embeddings there is no
    output layer, so that a checkpoint has the matrix once. `forward` then reads the weight of the
    embedding without calling it: for FSDP2 it must belong to the Decoder. num_ids: of the tokenizer.
    compiles_loss: whether the loss of a training step goes through torch.compile.
    """

    TRUNK: ClassVar[str]
    """The attribute that holds everything but the output layer; the name that it has in transformers."""
    EMBEDDING: ClassVar[str]
    """The attribute of the trunk with the embedding of token ids, an nn.Embedding."""
    BLOCKS: ClassVar[str]
    """The attribute of the trunk with the layers, an nn.ModuleList."""
    LAST_NORM: ClassVar[str]
    """The attribute of the trunk with the norm after the last block."""
    OUTPUT: ClassVar[str] = "lm_head"
    """The attribute with the output layer, beside the trunk."""
    context: int | None = None
    """The most tokens that `generate` gives the model to read; None: all. `forge.load` sets it to
    train.seq_len: positions beyond were never trained."""

    def __init__(self, settings: Model, num_ids: int) -> None:
        super().__init__()
        self.settings = settings
        self.compiles_loss = False
        rows = settings.num_rows(num_ids)
        # On meta: a sharded model must never be on one device as a whole.
        with torch.device("meta"):
            self.add_module(self.TRUNK, self.make_trunk(rows))
            if not settings.tie_embeddings:
                self.add_module(self.OUTPUT, OutputLayer(settings.dim, rows, bias=False))

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or with targets their mean cross entropy, a scalar in fp32. documents: of the
        tokens, which attention then stays inside of; None: each window is one document."""
        x_BTD = self.trunk(tokens_BT, documents)
        if self.output is None:
            return _logits_or_loss(x_BTD, self.embedding.weight, targets_BT, self.compiles_loss)
        return self.output(x_BTD, targets_BT, self.compiles_loss)

    # --- text ---

    def generate(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        *,
        seed: int = 0,
        temperature: float = 0.8,
        top_k: int = 50,
        end_id: int | None = None,
    ) -> list[int]:
        """`num_tokens` ids that continue the prompt, which is not among them; fewer where `end_id`, that
        of the token which ends a text, would follow. Otherwise as `continuation`."""
        endless = self.continuation(prompt_ids, seed=seed, temperature=temperature, top_k=top_k)
        with closing(endless) as ids:
            return list(takewhile(lambda token: token != end_id, islice(ids, num_tokens)))

    @torch.no_grad()
    def continuation(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int = 0,
        temperature: float = 0.8,
        top_k: int = 50,
    ) -> Generator[int, None, None]:
        """Ids that continue the prompt, without an end. Each is drawn from the `top_k` most likely ones
        by a generator with this seed; with temperature 0 it is the most likely one.

        The model reads the last `context` tokens. There is no KV cache: each token costs a full forward
        pass. Raises ConfigError on an empty prompt, DataError where logits are not finite. Called on one
        rank with the whole model, on all ranks with a sharded one.
        """
        if not prompt_ids:
            raise ConfigError(
                "the prompt has no tokens", fix="give at least one character to continue"
            )
        was_training, generator = self.training, torch.Generator().manual_seed(seed)
        ids = list(prompt_ids)
        self.eval()
        try:
            while True:
                read = torch.tensor(
                    [ids[-(self.context or 0) :]], device=self.embedding.weight.device
                )
                logits_V = self(read)[0, -1].float().cpu()
                if not logits_V.isfinite().all():
                    raise DataError(
                        f"the logits of the model are not finite after {len(ids)} tokens",
                        cause="weights that have diverged, or a dtype too narrow for them",
                        fix="load an earlier checkpoint, or with dtype fp32",
                    )
                if temperature == 0:
                    token = int(logits_V.argmax())
                else:
                    top = logits_V.topk(min(top_k, len(logits_V)))
                    odds = (top.values / temperature).softmax(0)
                    token = int(top.indices[torch.multinomial(odds, 1, generator=generator)])
                ids.append(token)
                yield token
        finally:
            self.train(was_training)

    # --- what an architecture says of itself ---

    @abstractmethod
    def make_trunk(self, rows: int) -> nn.Module:
        """The trunk: called with tokens_BT and documents or None, it returns x_BTD after the last norm.
        rows: of the embedding."""

    @property
    @abstractmethod
    def narrow_width(self) -> int:
        """Largest width of the products that selective recomputation keeps."""

    @abstractmethod
    def adds_to_residual(self, name: str) -> bool:
        """Return whether the output of this matrix is added to the residual stream."""

    # --- what follows from it ---

    @property
    def trunk(self) -> nn.Module:
        trunk: nn.Module = getattr(self, self.TRUNK)
        return trunk

    @property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = getattr(self.trunk, self.EMBEDDING)
        return embedding

    @property
    def embedding_name(self) -> str:
        """The name of the embedding's matrix among the parameters."""
        return f"{self.TRUNK}.{self.EMBEDDING}.weight"

    @property
    def output(self) -> nn.Module | None:
        """The output layer; None with tied embeddings."""
        return getattr(self, self.OUTPUT, None)

    @property
    def output_name(self) -> str:
        """The name of the output layer's matrix, which some files have beside a tied embedding."""
        return f"{self.OUTPUT}.weight"

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, all alike: each is compiled, recomputed and sharded by itself."""
        blocks: nn.ModuleList = getattr(self.trunk, self.BLOCKS)
        return blocks

    @property
    def num_rows(self) -> int:
        """Rows of the embedding: the vocabulary and its padding."""
        return self.embedding.num_embeddings

    def ends(self) -> tuple[nn.Module, list[nn.Module]] | None:
        """The embedding, and all that follows the last block, each of which FSDP2 gathers by itself; None
        with tied embeddings, which both use."""
        if self.output is None:
            return None
        return self.embedding, [getattr(self.trunk, self.LAST_NORM), self.output]

    def is_in_block(self, name: str) -> bool:
        """Return whether a parameter belongs to a block: Muon updates the matrices of these."""
        return name.startswith(f"{self.TRUNK}.{self.BLOCKS}.")

    def num_parameters(self) -> int:
        """Number of weights; a tied matrix counts once."""
        return self.settings.num_parameters(self.num_rows)

    def flops_per_token(self, seq_len: int) -> float:
        """Return Model.flops_per_token for the rows of this decoder."""
        return self.settings.flops_per_token(self.num_rows, seq_len)


def make_decoder(settings: Model, num_ids: int) -> Decoder:
    """The decoder of these settings, from the module of its architecture."""
    own = f"forge.trainer.models.{settings.architecture}_decoder"
    module = import_module(settings.LAYERS or own)
    decoder: Decoder = module.DECODER(settings, num_ids)
    return decoder
