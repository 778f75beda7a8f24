"""The settings that people vary between runs, for TensorBoard's table of runs."""

from typing import Any

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
# The keys of the model JSON's training section that have an effect with each shape of the learning rate.
SCHEDULE_KEYS = {
    "LE": ("decay_rate", "decay_step"),
    "EE": ("decay_rate", "decay_step"),
    "linear": ("final_share",),
    "polynomial": ("decay_power", "final_share"),
    "cosine": ("final_share",),
    "wsd": ("decay_proportion", "final_share"),
}


def hyperparameters(settings: Settings) -> dict[str, Any]:
    """Settings by name, without those that have no effect in this run."""
    recipe, flags, model = settings.recipe(), settings.training_flags, settings.model_config.to_dict()
    optimizer = recipe["optimizer"] or {}
    # With a time budget the schedule is stretched to the clock.
    end = "total_training_steps" if settings.time_budget is None else "time_budget"
    schedule_keys = SCHEDULE_KEYS.get(flags.lr_schedule, ())
    keys = ("learning_rate", "lr_schedule", "warmup_proportion", *schedule_keys, "weight_decay", end)
    found = {
        **{key: recipe[key] for key in keys},
        "batch_size": settings.deepspeed.batch.total,
        "batch_schedule": recipe["batch_schedule"],
        "length_schedule": recipe["length_schedule"],
        "max_steps": flags.max_steps,
        "max_seq_length": settings.data_flags.max_seq_length,
        "masking_rate": recipe["masking_rate"],
        "masking_unit": recipe["masking_unit"],
        "optimizer": optimizer.get("type", "AdamW"),
        "gradient_clipping": recipe["gradient_clipping"],
        "precision": settings.precision,
        "zero_stage": settings.deepspeed.zero_stage,
        "seed": flags.seed,
        "is_preln": settings.model_flags.preln,
        **{key: model[key] for key in MODEL_KEYS},
    }
    return {key: value for key, value in found.items() if value is not None}
