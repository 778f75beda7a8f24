"""The settings that people vary between runs, for TensorBoard's table of runs."""

from typing import Any

from training.plan.learning_rate import effective_recipe
from training.settings.resolve import Settings

MODEL_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "sentence_head",
)


def hyperparameters(settings: Settings) -> dict[str, Any]:
    """Settings by name, without those that have no effect in this run."""
    flags, model = settings.training_flags, settings.model_config.to_dict()
    found = {
        **effective_recipe(settings.recipe()),
        "max_steps": flags.max_steps,
        "max_seq_length": settings.data_flags.max_seq_length,
        "precision": settings.precision,
        "zero_stage": settings.deepspeed.zero_stage,
        "seed": flags.seed,
        "is_preln": settings.model_flags.preln,
        **{key: model[key] for key in MODEL_KEYS},
    }
    return {key: value for key, value in found.items() if value is not None}
