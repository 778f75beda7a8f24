"""The stream of rows that a segment of the plan reads, and its masks."""

from collections.abc import Sequence

from data.masking import MaskingPolicy
from data.shards.dataset import PretrainingDataset
from data.stream.loader import TrainingStream
from training.plan.step_plan import Segment
from training.runtime.ranks import RankInfo
from training.settings.resolve import Settings


def build_stream(
    settings: Settings, rank_info: RankInfo, training: Sequence[PretrainingDataset], segment: Segment
) -> TrainingStream:
    """The stream of the segment's steps over the data of its phase."""
    phase = segment.phase
    return TrainingStream(
        training[phase.index],
        seed=settings.training_flags.seed,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        micro_batch_size=phase.micro,
        gradient_accumulation_steps=segment.accumulation,
        masking=build_masking(settings, segment) if settings.data_flags.dynamic_masking else None,
        stream_start=phase.first_sample,
    )


def build_masking(settings: Settings, segment: Segment) -> MaskingPolicy:
    tokenizer, flags, phase = settings.tokenizer, settings.data_flags, segment.phase
    assert tokenizer is not None  # find_tokenizer() checks it
    rates = flags.masking_rate
    steps = rates.in_steps(segment.rows * phase.tokens_per_row, phase.tokens_before)
    return MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=settings.lengths[phase.index].max_predictions,
        rate=rates.points[0][1],
        rate_schedule=() if rates.is_constant else steps,
        unit=flags.masking_unit,
        continuation_ids=tokenizer.continuation_ids,
    )
