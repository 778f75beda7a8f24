"""The part of a run's recipe that has an effect, for tables that people read."""

from collections.abc import Mapping
from typing import Any

# The keys of the model JSON's training section that have an effect with each shape of the learning rate.
SCHEDULE_KEYS = {
    "LE": ("decay_rate", "decay_step"),
    "EE": ("decay_rate", "decay_step"),
    "linear": ("final_share",),
    "polynomial": ("decay_power", "final_share"),
    "cosine": ("final_share",),
    "wsd": ("decay_proportion", "final_share"),
}
OTHER_KEYS = ("batch_schedule", "length_schedule", "masking_rate", "masking_unit", "gradient_clipping")


def effective_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `recipe`, as a checkpoint saves it, without those that have no effect or were not given."""
    # With a time budget the schedule is stretched to the clock.
    end = "total_training_steps" if recipe.get("time_budget") is None else "time_budget"
    schedule_keys = SCHEDULE_KEYS.get(str(recipe.get("lr_schedule")), ())
    keys = ("learning_rate", "lr_schedule", "warmup_proportion", *schedule_keys, "weight_decay", end, *OTHER_KEYS)
    optimizer = recipe.get("optimizer")
    found = {
        **{key: recipe.get(key) for key in keys},
        "batch_size": recipe.get("batch"),
        "optimizer": optimizer.get("type", "AdamW") if isinstance(optimizer, dict) else "AdamW",
    }
    return {key: value for key, value in found.items() if value is not None}
