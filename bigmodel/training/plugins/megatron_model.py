"""A megatron-core `GPTModel` that takes batches as transformers' causal language models do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import TrainingError
from .megatron_names import Rule

__all__ = ["MegatronModel", "MegatronOutput"]

IGNORED = -100
"""The label of a token that does not count, in transformers."""


class MegatronOutput(NamedTuple):
    """What a forward gives."""

    loss: torch.Tensor | None
    """With labels: of this process, without dimensions. Its mean over processes is the loss of the whole batch."""
    logits: torch.Tensor | None
    """[batch, tokens, words] in all tensor-parallel processes; None with labels, unless the plugin says `return_logits`."""


class MegatronModel(nn.Module):
    """A prepared model.

    Args:
        module: the `GPTModel`, this process's part of it, perhaps in a `DistributedDataParallel`.
        plugin: the `MegatronLMPlugin`.
        mesh: the one-dimensional mesh of tensor-parallel processes.
        config: the transformers model's; None for a `GPTModel` of the user's own.
        rules: where the transformers model's tensors lie in the `GPTModel`; None for a `GPTModel` of the user's own.
        aliases: names of tied tensors of the transformers model, by the name that `rules` have.

    Attributes:
        module, config, rules, aliases: as given.
    """

    def __init__(
        self,
        module: nn.Module,
        plugin: Any,
        mesh: Any,
        config: Any = None,
        rules: Sequence[Rule] | None = None,
        aliases: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self.module = module
        self.config = config
        self.rules = rules
        self.aliases = dict(aliases or {})
        self._plugin = plugin
        self._mesh = mesh
        self._end = getattr(config, "eos_token_id", None)
        if plugin.eod_mask_loss and not isinstance(self._end, int):
            raise TrainingError(
                f"eod_mask_loss: the model's config has eos_token_id {self._end!r}, and one token has to end documents. Give labels that "
                f"are {IGNORED} there instead."
            )

    @property
    def gpt(self) -> Any:
        """The `GPTModel`."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> MegatronOutput:
        """Predicts each token from those before.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: [batch, tokens], 0 where a token is a filler.
            labels: int64 [batch, tokens], the tokens themselves (they are compared with the prediction one place before), -100 where a
                token does not count.
            position_ids: int64 [batch, tokens], for learned positions; None: from 0 on.
        """
        batch, tokens = input_ids.shape
        most = self._plugin.seq_length or self.gpt.max_sequence_length
        if tokens > most:
            raise TrainingError(f"A batch has sequences of {tokens} tokens: the model has positions for {most}.")
        if position_ids is None:
            position_ids = torch.arange(tokens, device=input_ids.device).expand(batch, -1)
        elif self.gpt.position_embedding_type != "learned_absolute":
            raise TrainingError("position_ids: megatron-core's rotary positions are the places of tokens in the sequence; leave them out.")
        hidden = None if attention_mask is None else _hidden(attention_mask)
        if labels is None:
            return MegatronOutput(None, self._whole(self.module(input_ids, position_ids, hidden)))
        following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        counts = following != IGNORED
        if self._plugin.eod_mask_loss:
            counts = counts & (input_ids != self._end)
        words = following.where(counts, 0)
        if not self._plugin.return_logits:
            return MegatronOutput(self._mean(self.module(input_ids, position_ids, hidden, labels=words), counts), None)
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = self.module(input_ids, position_ids, hidden)
        # The loss writes into what it is given.
        return MegatronOutput(self._mean(vocab_parallel_cross_entropy(logits.float().clone(), words), counts), self._whole(logits))

    def _mean(self, losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Of losses [batch, tokens] that count: over the tokens of all processes, or of this one (`calculate_per_token_loss=False`)."""
        from megatron.core import parallel_state

        total = counts.sum()
        group = parallel_state.get_data_parallel_group()
        processes = group.size()
        if self._plugin.calculate_per_token_loss and processes > 1:
            dist.all_reduce(total, group=group)
            losses = losses * processes  # gradients are averaged over the processes
        return (losses * counts).sum() / total.clamp(min=1)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all words, of which this process has computed some."""
        if self._mesh.size() == 1:
            return logits
        from torch.distributed.tensor import DTensor, Replicate, Shard

        # Every process computes the same with them, so the gradient of its own ones is whole there.
        part = DTensor.from_local(logits, self._mesh, [Shard(logits.dim() - 1)], run_check=False)
        return part.full_tensor(grad_placements=[Replicate()])


def _hidden(attention_mask: torch.Tensor) -> torch.Tensor:
    """True where a token [batch, 1, tokens, tokens] does not see another: a later one, or a filler."""
    tokens = attention_mask.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=attention_mask.device).triu(1)
    hidden = later | (attention_mask == 0)[:, None, None, :]
    # Fillers see themselves: nothing at all would make them no numbers.
    return hidden & ~torch.eye(tokens, dtype=torch.bool, device=attention_mask.device)
