"""The model card, README.md of an exported folder: how to use the model, how it was trained, and how good it is."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from common.words import counted, markdown_table
from nvidia.config import BertConfig
from training.checkpoints.state import TrainingState
from training.export.card_facts import CardFacts, CardRequest
from training.export.folder import CARD_HEADING
from training.inputs.datasets import PAIRS
from training.metrics.reader import shared_probes
from training.plan.learning_rate import effective_recipe
from training.settings.first_weights import EXTRA_WEIGHTS

OBJECTIVES = {
    "nsp": "masked tokens and next sentence (nsp)",
    "sop": "masked tokens and sentence order (sop)",
    "none": "masked tokens alone",
}
BLANK = "> **[TO BE FILLED IN]**"
EXAMPLE = """from transformers import pipeline

fill = pipeline("fill-mask", model=".")  # the path of this folder
for guess in fill(f"this is a {fill.tokenizer.mask_token} ."):
    print(f"{guess['score']:.1%} {guess['token_str']}")"""
EXAMPLE_WITHOUT_TOKENIZER = """import torch
from transformers import AutoModelForMaskedLM

model = AutoModelForMaskedLM.from_pretrained(".")  # the path of this folder, which has no tokenizer
print(model(torch.tensor([[2, 3, 4]])).logits.shape)"""


def model_card(
    state: TrainingState,
    hf_config: dict[str, Any],
    facts: CardFacts,
    request: CardRequest,
    has_tokenizer: bool,
    evaluation: str | None = None,
) -> str:
    """`evaluation`: results of evaluation.run for this model, in Markdown."""
    config = BertConfig.from_dict(state.model_config)
    architecture = hf_config["architectures"][0]
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
{_metadata(request, facts.languages)}---
# {"Pre-LN" if state.is_preln else "Post-LN"} BERT, {counted(config.num_hidden_layers, "layer")} of {config.hidden_size}

Loads with `{architecture}.from_pretrained` of stock transformers:

```python
{EXAMPLE if has_tokenizer else EXAMPLE_WITHOUT_TOKENIZER}
```

{_sentence_head_text(architecture, config)}
## Intended use
{BLANK} What the model is for, and what it is not for.

## Limits
{BLANK} Known weaknesses and biases of the model and of its data.

## Data
{_data_text(state, facts)}

## Training
Objective: {OBJECTIVES[config.sentence_head]}.
{counted(state.step, "optimizer step")}, {state.samples:,} rows and {state.tokens:,} real tokens, seed {state.seed}.
Vocabulary of {config.num_tokens:,} tokens, {config.max_position_embeddings} positions.

{_training_table(state, facts)}

{CARD_HEADING}
{_validation_text(facts.validation, config.sentence_head)}

{_probe_text(facts.probes)}## Evaluation on other tasks
{evaluation or f"{BLANK} Tasks, metrics and results: python -m evaluation.run, then export again."}
"""


def _metadata(request: CardRequest, found: Sequence[str]) -> str:
    """`found`: languages that the preparation of the data knows, for a user who gave none."""
    lines = [] if request.license is None else [f"license: {json.dumps(request.license)}"]
    codes = found if request.language is None else [code.strip() for code in request.language.split(",")]
    if any(codes):
        lines += ["language:", *(f"- {json.dumps(code)}" for code in codes if code)]
    return "".join(f"{line}\n" for line in lines)


def _data_text(state: TrainingState, facts: CardFacts) -> str:
    lines = [state.data_summary or "The number of rows was not recorded.", *(f"- {line}" for line in facts.data)]
    return "\n".join([*lines, "", f"{BLANK} Source and licence of the texts."])


def _training_table(state: TrainingState, facts: CardFacts) -> str:
    rows = {
        "hardware": facts.hardware or "not recorded",
        "processes": counted(state.world_size, "rank") + f", ZeRO stage {state.zero_stage}",
        "precision": state.precision,
        "time (h:mm:ss)": str(timedelta(seconds=round(state.seconds))) if state.seconds else "not recorded",
        **effective_recipe(state.recipe or {}),
    }
    return "\n".join(markdown_table(["setting", "value"], rows.items()))


def _sentence_head_text(architecture: str, config: BertConfig) -> str:
    """Where the sentence head is and what its classes mean; "" if there is none."""
    if not config.has_sentence_head:
        return ""
    classes = f'class 0 is "B follows A", class 1 "{PAIRS[config.sentence_head]}"'
    if architecture == "BertForPreTraining":
        return f"Its sentence head is that of `BertForPreTraining`; {classes}.\n"
    return f"""The pooler and the sentence head, for which that class has no parameters, are in `{EXTRA_WEIGHTS}`: the
scores are `cls.seq_relationship` of tanh of `bert.pooler.dense_act` of the final state of `[CLS]`; {classes}.
"""


def _probe_text(probes: tuple[Mapping[str, float], Mapping[str, float]] | None) -> str:
    """The section of probes; "" if there are none."""
    if probes is None:
        return ""
    first, last = probes
    header = ["probe", f"at step {first['step']:,}", f"at step {last['step']:,}"]
    rows = [(name, f"{100 * first[name]:.1f}", f"{100 * last[name]:.1f}") for name in shared_probes(probes)]
    heading = "## Probes during training"
    what = "The model without fine-tuning, × 100 (docs/evaluation.md of the training code)."
    return "\n".join([heading, what, "", *markdown_table(header, rows), "\n"])


def _validation_text(validation: Mapping[str, Any] | None, sentence_head: str) -> str:
    if validation is None:
        return "Not known here: the export found no metrics.jsonl with a validation."
    columns = {
        "step": str(validation["step"]),
        "masked-LM loss (nats)": f"{validation['mlm_loss']:.3f}",
        "perplexity": f"{validation['perplexity']:.1f}",
        "masked tokens right": f"{validation['mlm_accuracy']:.1%}",
    }
    if validation.get("nsp_accuracy") is not None:
        columns["sentence order right" if sentence_head == "sop" else "next sentence right"] = (
            f"{validation['nsp_accuracy']:.1%}"
        )
    return "\n".join(markdown_table([*columns], [[*columns.values()]]))
