"""The stream of rows that a segment of the plan reads, and its masks."""

from collections.abc import Sequence

from data.masking import MaskingPolicy
from data.shards.dataset import PretrainingDataset
from data.stream.loader import TrainingStream
from training.plan.step_plan import Segment
from training.runtime.ranks import RankInfo
from training.settings.resolve import MaskingRequest


def build_stream(
    training: Sequence[PretrainingDataset],
    rank_info: RankInfo,
    seed: int,
    masking: MaskingRequest | None,
    segment: Segment,
) -> TrainingStream:
    """The stream of the segment's steps over the data of its phase; `training` has one dataset per length."""
    phase = segment.phase
    return TrainingStream(
        training[phase.index],
        seed=seed,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        micro_batch_size=phase.micro,
        gradient_accumulation_steps=segment.accumulation,
        masking=None if masking is None else build_policy(masking, segment),
        stream_start=phase.first_sample,
    )


def build_policy(masking: MaskingRequest, segment: Segment) -> MaskingPolicy:
    tokenizer, rates, phase = masking.tokenizer, masking.rates, segment.phase
    steps = rates.in_steps(segment.rows * phase.tokens_per_row, phase.tokens_before)
    return MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=masking.max_predictions[phase.index],
        rate=rates.points[0][1],
        rate_schedule=() if rates.is_constant else steps,
        unit=masking.unit,
        continuation_ids=tokenizer.continuation_ids,
    )
