"""The model card, README.md of an exported folder: how to load the model, how it was trained, and how good it is."""

from typing import Any

from nvidia.config import BertConfig
from training.checkpoints.state import TrainingState
from training.export.folder import CARD_HEADING, EXTRA_WEIGHTS
from training.inputs.data_fit import PAIRS

OBJECTIVES = {
    "nsp": "masked tokens and next sentence (nsp)",
    "sop": "masked tokens and sentence order (sop)",
    "none": "masked tokens alone",
}


def model_card(state: TrainingState, hf_config: dict[str, Any], validation: dict[str, Any] | None) -> str:
    """`validation`: the last validation line of metrics.jsonl, if there is one."""
    config = BertConfig.from_dict(state.model_config)
    architecture = hf_config["architectures"][0]
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---
# {"Pre-LN" if state.is_preln else "Post-LN"} BERT, {config.num_hidden_layers} layers of {config.hidden_size}

Loads with `{architecture}.from_pretrained` of stock transformers.

{_sentence_head_text(state, config)}
## Training
Objective: {OBJECTIVES[config.sentence_head]}.
{state.step:,} optimizer steps, {state.samples:,} rows and {state.tokens:,} real tokens, seed {state.seed}.
Vocabulary of {config.num_tokens:,} tokens, {config.max_position_embeddings} positions.

{CARD_HEADING}
{_validation_text(validation)}
"""


def _sentence_head_text(state: TrainingState, config: BertConfig) -> str:
    """Where the sentence head is and what its classes mean; "" if there is none."""
    if not config.has_sentence_head:
        return ""
    classes = f'class 0 is "B follows A", class 1 "{PAIRS[config.sentence_head]}"'
    if not state.is_preln:
        return f"Its sentence head is that of `BertForPreTraining`; {classes}.\n"
    return f"""The pooler and the sentence head, for which that class has no parameters, are in `{EXTRA_WEIGHTS}`: the
scores are `cls.seq_relationship` of tanh of `bert.pooler.dense_act` of the final state of `[CLS]`; {classes}.
"""


def _validation_text(validation: dict[str, Any] | None) -> str:
    if validation is None:
        return "Not known: no metrics.jsonl with a validation was given to the export."
    columns = {
        "step": str(validation["step"]),
        "masked-LM loss (nats)": f"{validation['mlm_loss']:.3f}",
        "perplexity": f"{validation['perplexity']:.1f}",
        "masked tokens right": f"{validation['mlm_accuracy']:.1%}",
    }
    if validation.get("nsp_accuracy") is not None:
        columns["next sentence right"] = f"{validation['nsp_accuracy']:.1%}"
    rows = (list(columns), ["---"] * len(columns), list(columns.values()))
    return "\n".join(f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|" for row in rows)
