"""Our own model in evaluation: Hugging Face folders loaded into it, masks filled in and states pooled on packed tokens.

This is the only module of the package that uses nvidia.

B rows, S padded length, T real tokens, U rows whose final state is needed, H hidden size.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.memory import keep_freed_memory
from common.weights import read_folder_tensors
from evaluation.pseudo_likelihood.likelihood import ALONE, Batch, Scorer, Team, evaluating
from nvidia.cpu.libraries import forced_libraries, use
from nvidia.cpu.startup import configure_onednn
from nvidia.fastest import measure_libraries
from nvidia.interop.hugging_face import from_hugging_face, is_pre_ln
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import plan_packing, plan_with_rows, real_tokens

TOKENS_AT_ONCE = 4096  # large enough for the products to run at the processor's speed, small enough for its cache
HEAD_ROWS = 128  # rows of scores at a time: each is as long as the vocabulary
SENTENCE_LENGTH = 16  # tokens of a typical sentence, for measuring products


def load_native(folder: Path) -> PreTrainingModel:
    """A Hugging Face folder as our model, for scoring. Raises UserError with the reason where that is not possible."""
    return to_native(read_folder_tensors(folder), json.loads((folder / "config.json").read_text()), str(folder))


def to_native(tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> PreTrainingModel:
    """Weights and config.json's content of a stock masked language model as our model."""
    try:
        state, own_config = from_hugging_face(tensors, config)
        model = (BertForPreTrainingPreLN if is_pre_ln(state) else BertForPreTraining)(own_config)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{where}: weights and config.json do not fit each other ({reason})") from None
    # Scores of masked tokens need neither the pooler nor the sentence head.
    missing = [name for name in missing if not name.startswith(("bert.pooler.", "cls.seq_relationship."))]
    if missing or unexpected:
        raise UserError(f"{where}: our model needs {missing[:3]} and does not know {unexpected[:3]}")
    return model.eval()


def prepare_process() -> None:
    """Settings of oneDNN and of the memory allocator for a process that evaluates, before its first product."""
    configure_onednn()
    keep_freed_memory()


def use_fastest_products(model: PreTrainingModel) -> None:
    """Let the library that is fastest on this processor compute the products of a scorer; for the whole process.

    Not for a model in training: its run has chosen.
    """
    forced = forced_libraries()
    rows = TOKENS_AT_ONCE // SENTENCE_LENGTH
    use(measure_libraries(model.config, rows, SENTENCE_LENGTH).libraries if forced is None else forced)


class PackedScorer(Scorer):
    """Our model with real tokens only, the last block and the head on masked rows only.

    `head_rows`: rows of scores at a time; None: all of a batch, as a team with partitioned weights needs it, whose
    processes must call each module equally often.
    """

    def __init__(
        self,
        model: PreTrainingModel,
        pad_id: int = 0,
        tokens_at_once: int = TOKENS_AT_ONCE,
        team: Team = ALONE,
        head_rows: int | None = HEAD_ROWS,
    ) -> None:
        super().__init__(model, pad_id, team)
        self.tokens_at_once, self.head_rows = tokens_at_once, head_rows

    def make_batches(self, lengths: Sequence[int]) -> list[np.ndarray]:
        return batches_by_length(lengths, self.tokens_at_once)

    def compute_scores(self, batch: Batch) -> Iterator[Tensor]:
        ids = batch.ids
        flat = batch.rows * ids.shape[1] + batch.positions  # [e] in the flattened batch
        wanted = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, flat, True).view(ids.shape)
        packing, used = plan_with_rows(real_tokens(batch.mask), wanted)  # used: [U] packed positions
        states = self.model.encode_rows(ids, torch.zeros_like(ids), packing, used)  # [U, H]
        place = torch.empty(ids.numel(), dtype=torch.long, device=ids.device)
        place[packing.indices[used]] = torch.arange(len(used), device=ids.device)
        for rows in place[flat].split(self.head_rows or len(flat)):  # the rows of `states` that entries read
            yield self.model.cls.predictions(states[rows]).float()


def batches_by_length(lengths: Sequence[int], tokens_at_once: int) -> list[np.ndarray]:
    """Numbers of inputs, the longest first, so that those of one length are together."""
    by_length = np.argsort(-np.asarray(lengths), kind="stable")
    batches, first = [], 0
    while first < len(by_length):
        size = max(1, tokens_at_once // lengths[by_length[first]])
        batches.append(by_length[first : first + size])
        first += size
    return batches


@torch.no_grad()
def mean_states(
    model: PreTrainingModel, rows: Sequence[Sequence[int]], tokens_at_once: int = TOKENS_AT_ONCE, team: Team = ALONE
) -> Tensor:
    """[N, H] fp32 on the CPU: the mean of the final states of each row's tokens."""
    device = next(model.parameters()).device

    def work(chosen: np.ndarray) -> Tensor:
        ids = torch.zeros(len(chosen), len(rows[chosen[0]]), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(chosen):
            ids[place, : len(rows[row])] = torch.as_tensor(rows[row])
            mask[place, : len(rows[row])] = 1
        ids, mask = ids.to(device), mask.to(device)
        packing = plan_packing(real_tokens(mask))
        states = model.encode_rows(ids, torch.zeros_like(ids), packing, None).float()  # [T, H]
        sums = states.new_zeros(len(chosen), states.shape[1]).index_add_(0, packing.sequence_of, states)
        return (sums / mask.sum(1, keepdim=True)).cpu()

    batches = batches_by_length([len(row) for row in rows], tokens_at_once)
    result = torch.empty(len(rows), model.config.hidden_size)
    with evaluating(model):
        for chosen, means in zip(batches, team.all_ranks_map(work, batches), strict=True):
            result[chosen] = means
    return result
