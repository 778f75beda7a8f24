"""The model card, README.md of an exported folder: how to use the model, how it was trained, and how good it is."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from common.words import counted, markdown_table
from nvidia.config import BertConfig
from training.checkpoints.paths import MODEL_JSON, RESOLVED
from training.checkpoints.state import TrainingState
from training.inputs.datasets import PAIRS
from training.metrics.reader import ProbeGain, find_probe_gain, last_validation, read_metrics
from training.plan.learning_rate import effective_recipe
from training.settings.first_weights import EXTRA_WEIGHTS

MAX_FILES = 10  # named for each folder of shards
# data.prepare splits sentences as for English unless --language says otherwise, so that the language is known only if
# the text has the commonest English words.
DEFAULT_LANGUAGE = "en"
ENGLISH_WORDS = frozenset(("the", "of", "and", "to", "in", "a"))
MIN_ENGLISH_WORDS = 4  # among the 25 commonest tokens
HEADING = "## Measured on the validation shards"
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


class CardRequest(NamedTuple):
    """What the user states about the model."""

    license: str | None = None  # as Hugging Face names it: apache-2.0
    language: str | None = None  # codes, separated by commas: en,de


class CardFacts(NamedTuple):
    """What the files of a run state; empty where they do not."""

    data: tuple[str, ...] = ()  # a line for each folder of shards
    languages: tuple[str, ...] = ()  # codes
    hardware: str | None = None
    validation: Mapping[str, Any] | None = None
    probes: ProbeGain | None = None


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

{HEADING}
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


def _probe_text(probes: ProbeGain | None) -> str:
    """The section of probes; "" if there are none."""
    if probes is None:
        return ""
    header = ["probe", *(f"at step {step:,}" for step in probes.steps)]
    rows = [(name, *(f"{100 * figure:.1f}" for figure in figures)) for name, figures in probes.figures.items()]
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


def read_card_facts(checkpoint: Path, metrics: Path | None, step: int) -> CardFacts:
    """The facts of `checkpoint`, which was saved at `step`. What cannot be read is left out."""
    rows = [] if metrics is None else read_metrics(metrics)
    hardware = [row["hardware"] for row in rows if isinstance(row.get("hardware"), str)]
    resolved = _read(checkpoint / RESOLVED)
    model = _find(resolved, "model") or _read(checkpoint / MODEL_JSON)
    names = _find(model, "data", "mixed_seq_datasets", str(_find(resolved, "flags", "max_seq_length")))
    prefix = Path(str(_find(resolved, "flags", "data_path_prefix") or ""))
    folders = {name: prefix / str(path) for name, path in names.items()} if isinstance(names, dict) else {}
    lines, languages = [], set()
    for name, folder in folders.items():
        report, language = _read(folder / "report.json"), _find(_read(folder / "manifest.json"), "settings", "language")
        lines.append(f"`{name}` ({folder.name}): {_describe_data(report, language)}")
        if isinstance(language, str) and (language != DEFAULT_LANGUAGE or _is_english(report)):
            languages.add(language)
    return CardFacts(
        tuple(lines),
        tuple(sorted(languages)),
        hardware[-1] if hardware else None,
        last_validation(metrics, step),
        find_probe_gain(metrics, step),
    )


def _describe_data(report: Any, language: Any) -> str:
    """What the report of a preparation says about its texts."""
    counts = {key: _find(report, "preparation", key) for key in ("documents", "sentences", "tokens")}
    parts = [f"{count:,} {key}" for key, count in counts.items() if isinstance(count, int)]
    if isinstance(language, str):
        parts.append(f"prepared for the language `{language}`")
    inputs = _find(report, "inputs")
    if isinstance(inputs, list) and inputs:
        files = [f"`{Path(str(_find(file, 'file'))).name}`" for file in inputs]
        more = f" and {counted(len(files) - MAX_FILES, 'more file')}" if len(files) > MAX_FILES else ""
        parts.append(f"from {', '.join(files[:MAX_FILES])}{more}")
    return ", ".join(parts) or "no report of its preparation was found"


def _is_english(report: Any) -> bool:
    splits = _find(report, "splits")
    commonest = _find(splits[0], "commonest_tokens") if isinstance(splits, list) and splits else None
    tokens = [str(entry[0]).lstrip("\u0120\u2581").lower() for entry in commonest or () if entry]
    return len(ENGLISH_WORDS.intersection(tokens)) >= MIN_ENGLISH_WORDS


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _find(content: Any, *keys: str) -> Any:
    """The value at `keys` in nested JSON objects, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content
