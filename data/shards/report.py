"""What is in a folder of shards: counts, fill, lengths, tokens, samples, and warnings about data that cannot train."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from common.words import counted
from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows, concatenate_rows
from data.shards.statistics import text_tokens
from data.tokenizer import BertTokenizer

SAMPLE_ROWS = 20_000  # spread over the whole split; exact shares are not worth reading everything
_ROWS_AT_ONCE = 500
_NUM_TOKENS = 25
_NUM_INSTANCES = 4


@dataclass
class Description:
    """One split of one folder. Shares are of the rows looked at."""

    folder: str
    split: str
    files: int
    rows: int
    rows_looked_at: int
    max_seq_length: int
    max_predictions_per_seq: int
    fill: float  # share of positions that hold a token
    tokens: int  # in all rows, estimated from those looked at
    predictions_a_row: float
    masked_share: float  # of real tokens
    random_next_share: float  # of rows labelled 1
    unknown_share: float | None  # of text tokens; None without a tokenizer
    repeated_rows_share: float
    distinct_tokens: int
    lengths: list[int]  # lengths[k] = rows with k tokens
    commonest_tokens: list[tuple[str, float]]
    instances: list[str]
    warnings: list[str] = field(default_factory=list)


class Whole(NamedTuple):
    """All of a split, where only some of its shards are at hand."""

    folder: str
    files: int
    rows: int


def describe(
    dataset: PretrainingDataset, split: str, tokenizer: BertTokenizer | None, whole: Whole | None = None
) -> Description:
    """Look at a sample of rows spread over the dataset."""
    whole = whole or Whole(str(dataset.files[0].parent), len(dataset.files), dataset.num_rows)
    rows = _sample(dataset)
    tokens = text_tokens(rows)
    lengths = rows.input_mask.sum(axis=1, dtype=np.int64)
    counts = np.bincount(tokens) if len(tokens) else np.zeros(1, dtype=np.int64)
    commonest = np.argsort(-counts, kind="stable")[:_NUM_TOKENS]
    predictions = (rows.masked_lm_positions > 0).sum(axis=1)
    width = rows.input_ids.shape[1]
    found = Description(
        folder=whole.folder,
        split=split,
        files=whole.files,
        rows=whole.rows,
        rows_looked_at=len(rows),
        max_seq_length=width,
        max_predictions_per_seq=rows.masked_lm_positions.shape[1],
        fill=float(lengths.mean() / width),
        tokens=round(float(lengths.mean()) * whole.rows),
        predictions_a_row=float(predictions.mean()),
        masked_share=float(predictions.sum() / lengths.sum()),
        random_next_share=float((rows.next_sentence_labels == 1).mean()),
        unknown_share=None if tokenizer is None else float((tokens == tokenizer.unk_id).mean()),
        repeated_rows_share=_repeated_share(rows),
        distinct_tokens=int((counts > 0).sum()),
        lengths=np.bincount(lengths, minlength=width + 1).tolist(),
        commonest_tokens=[
            (_name(int(i), tokenizer), float(counts[i] / max(1, len(tokens)))) for i in commonest if counts[i]
        ],
        instances=[_decoded(rows, i, tokenizer) for i in range(min(_NUM_INSTANCES, len(rows)))],
    )
    found.warnings = _warnings(found, dataset.is_masked, bool((rows.next_sentence_labels < 0).all()), tokenizer)
    if tokenizer is not None and dataset.tokenizer_digest not in (None, tokenizer.digest):
        found.warnings.insert(
            0,
            "another tokenizer made these shards, so the words shown here are not what stands in them; give the right "
            "one with --vocab_file",
        )
    return found


def _sample(dataset: PretrainingDataset) -> Rows:
    if dataset.num_rows <= SAMPLE_ROWS:
        return dataset.read_range(0, dataset.num_rows)
    parts: list[Rows] = []
    for start in np.linspace(0, dataset.num_rows - _ROWS_AT_ONCE, SAMPLE_ROWS // _ROWS_AT_ONCE).astype(int).tolist():
        parts.append(dataset.read_range(start, start + _ROWS_AT_ONCE))
        dataset.close()  # an open file takes a megabyte; few are asked for again, and then reopened
    return concatenate_rows(parts)


def _repeated_share(rows: Rows) -> float:
    originals = rows.with_originals().input_ids
    return 1.0 - len({row.tobytes() for row in originals}) / len(originals)


def _name(token: int, tokenizer: BertTokenizer | None) -> str:
    found = tokenizer.backend.id_to_token(token) if tokenizer else None
    return found if found is not None else f"#{token}"


def _decoded(rows: Rows, number: int, tokenizer: BertTokenizer | None) -> str:
    """A row as text, with each prediction as what stands there ← what it was."""
    row = rows.take(slice(number, number + 1))
    originals = row.with_originals().input_ids[0]
    predicted = set(row.masked_lm_positions[0][row.masked_lm_positions[0] > 0].tolist())
    words = []
    for place in range(int(row.input_mask[0].sum())):
        name = _name(int(row.input_ids[0, place]), tokenizer)
        words.append(f"⟨{name}←{_name(int(originals[place]), tokenizer)}⟩" if place in predicted else name)
    label = {0: "B follows A", 1: "B is random or swapped"}.get(int(row.next_sentence_labels[0]), "no pair")
    return f"({label}) {' '.join(words).replace(' ##', '')}"


def _warnings(found: Description, is_masked: bool, without_pairs: bool, tokenizer: BertTokenizer | None) -> list[str]:
    """Data of the kind that leaves a loss stuck, each with the remedy."""
    warnings = []
    if found.repeated_rows_share > 0.02:
        warnings.append(
            f"{found.repeated_rows_share:.1%} of rows repeat another row: the text holds duplicates, which a model "
            "learns by heart; prepare it with `python -m data.prepare`, which drops them, and --near_duplicates 0.8 "
            "(`pip install -r requirements-extras.txt`)"
        )
    if found.unknown_share is not None and found.unknown_share > 0.01:
        warnings.append(
            f"{found.unknown_share:.1%} of tokens are unknown: the tokenizer does not suit the text; "
            "train one with --vocab_size, or check --do_lower_case"
        )
    if found.fill < 0.5:
        warnings.append(
            f"rows are filled to {found.fill:.0%}: documents are very short; check --layout (blank lines stand between "
            "documents, not sentences) or use a smaller --max_seq_length"
        )
    if not without_pairs and not 0.35 < found.random_next_share < 0.65:
        warnings.append(
            f"{found.random_next_share:.0%} of pairs are labelled 1, expected about half: documents of one sentence "
            "have no next one, and where all is one document there is no other to take a random one from; check "
            "--layout, give more documents, or use --objective mlm"
        )
    if is_masked and not 0.05 < found.masked_share < 0.6:
        warnings.append(f"{found.masked_share:.1%} of tokens are to be predicted, BERT uses 15 %; check --masking_rate")
    if found.commonest_tokens and found.commonest_tokens[0][1] > 0.2:
        name, share = found.commonest_tokens[0]
        warnings.append(f"{name!r} is {share:.0%} of all tokens: the text is tables or markup, not sentences; clean it")
    if found.split == "training" and found.rows < 5_000:
        warnings.append(f"{found.rows:,} rows are few: a model learns them by heart; add text, or raise --dupe_factor")
    if tokenizer is not None and found.rows_looked_at >= 10_000 and found.distinct_tokens < 0.3 * tokenizer.vocab_size:
        warnings.append(
            f"{found.distinct_tokens:,} of {tokenizer.vocab_size:,} tokens ever appear: is this the tokenizer that "
            "made the shards? Give the right one with --vocab_file, or train a smaller one"
        )
    return warnings


def report_files(found: Sequence[Description], preparation: dict[str, Any] | None = None) -> dict[str, str | bytes]:
    """The report as files by name."""
    document = {"preparation": preparation, "splits": [asdict(description) for description in found]}
    return {
        "report.json": json.dumps(document, indent=2) + "\n",
        "report.md": render(found, preparation),
        "lengths.png": plot_lengths(found),
    }


def render(found: Sequence[Description], preparation: dict[str, Any] | None = None) -> str:
    """The report as Markdown."""
    lines = [f"# {found[0].folder}", ""]
    if preparation:
        lines += ["## Preparation", "", *_table(preparation), ""]
    for description in found:
        lines += _render_split(description)
    return "\n".join(lines)


def _render_split(found: Description) -> list[str]:
    unknown = "not known (no tokenizer)" if found.unknown_share is None else f"{found.unknown_share:.3%}"
    facts = {
        "rows": f"{found.rows:,} in {counted(found.files, 'file')}",
        "looked at": f"{found.rows_looked_at:,} rows",
        "tokens a row, predictions a row": f"{found.max_seq_length}, {found.max_predictions_per_seq}",
        "fill": f"{found.fill:.1%}, about {found.tokens:,} tokens in all",
        "to be predicted": f"{found.masked_share:.1%} of tokens, {found.predictions_a_row:.1f} a row",
        "pairs labelled 1": f"{found.random_next_share:.1%}",
        "unknown tokens": unknown,
        "rows that repeat another": f"{found.repeated_rows_share:.2%}",
        "distinct tokens": f"{found.distinct_tokens:,}",
    }
    lines = [f"## {found.split}", "", *_table(facts), ""]
    lines += [*(f"**Warning:** {warning}\n" for warning in found.warnings)]
    lines += ["Commonest tokens: " + ", ".join(f"`{name}` {share:.1%}" for name, share in found.commonest_tokens), ""]
    lines += ["Rows as text, ⟨what stands there←what it was⟩:", ""]
    return lines + [f"> {text}\n" for text in found.instances]


def _table(facts: dict[str, Any]) -> list[str]:
    shown = {name: f"{value:,}" if isinstance(value, int | float) else value for name, value in facts.items()}
    return ["| | |", "|---|---|", *(f"| {name.replace('_', ' ')} | {value} |" for name, value in shown.items())]


def plot_lengths(found: Sequence[Description]) -> bytes:
    """A histogram of real tokens a row, as PNG."""
    # Imported here: nothing else needs it, and it is slow to load.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for description in found:
        shares = np.array(description.lengths) / max(1, description.rows_looked_at)
        axes.step(np.arange(len(shares)), shares * 100, where="mid", label=description.split)
    axes.set_xlabel("tokens a row")
    axes.set_ylabel("% of rows")
    axes.set_yscale("log")
    axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
