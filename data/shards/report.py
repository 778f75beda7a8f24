"""Describes a folder of shards: counts, fill, lengths, tokens, sample rows, and warnings about unsuitable data."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from common.words import counted, markdown_table
from data.shards.dataset import PretrainingDataset
from data.shards.length_chart import draw_lengths
from data.shards.schema import Rows, concatenate_rows
from data.tokenizer import SPACE_MARKS, BertTokenizer

SAMPLE_ROWS = 12_288  # spread over the whole split; exact shares are not worth reading all rows
_ROWS_AT_ONCE = 256  # a block of our shards
_MAX_OPEN_FILES = 8  # each takes a megabyte; opening one takes longer than reading its rows
_NUM_TOKENS = 25
_NUM_INSTANCES = 4
_NUM_INPUTS = 50


@dataclass
class Description:
    """One split of one folder. Shares refer to the sampled rows. The names are keys of report.json."""

    folder: str
    split: str
    files: int
    rows: int
    rows_looked_at: int
    max_seq_length: int
    max_predictions_per_seq: int
    fill: float  # share of positions with a token
    tokens: int  # in all rows, estimated from the sample
    predictions_a_row: float
    masked_share: float  # of real tokens
    random_next_share: float  # of rows labelled 1
    unknown_share: float | None  # of text tokens; None without a tokenizer
    copies: int  # of each document, with other masks; as many equal rows do not count as repeated
    repeated_rows_share: float
    distinct_tokens: int
    lengths: list[int]  # lengths[k] = rows with k tokens
    commonest_tokens: list[tuple[str, float]]
    instances: list[str]
    warnings: list[str] = field(default_factory=list)


class Preparation(NamedTuple):
    """What data.prepare knows about a split that it has just made; some of its shards may not be on this machine."""

    folder: str
    files: int
    rows: int
    copies: int
    has_trained: bool  # the tokenizer; otherwise it was given


def describe(
    dataset: PretrainingDataset,
    split: str,
    tokenizer: BertTokenizer | None,
    preparation: Preparation | None = None,
) -> Description:
    """Describe a split from a sample of rows spread over the dataset."""
    whole = preparation or Preparation(str(dataset.files[0].parent), len(dataset.files), dataset.num_rows, 1, False)
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
        unknown_share=None if tokenizer is None else float(np.mean(tokens == tokenizer.unk_id)),
        copies=whole.copies,
        repeated_rows_share=_repeated_share(rows, whole.copies),
        distinct_tokens=int((counts > 0).sum()),
        lengths=np.bincount(lengths, minlength=width + 1).tolist(),
        commonest_tokens=[
            (_token_name(int(i), tokenizer), float(counts[i] / max(1, len(tokens)))) for i in commonest if counts[i]
        ],
        instances=[_render_row(rows, i, tokenizer) for i in range(min(_NUM_INSTANCES, len(rows)))],
    )
    has_pairs = bool((rows.next_sentence_labels >= 0).any())
    found.warnings += _find_warnings(found, dataset, tokenizer, preparation, has_pairs)
    return found


def _sample(dataset: PretrainingDataset) -> Rows:
    if dataset.num_rows <= SAMPLE_ROWS:
        return dataset.read_range(0, dataset.num_rows)
    places = np.linspace(0, dataset.num_rows - _ROWS_AT_ONCE, SAMPLE_ROWS // _ROWS_AT_ONCE).astype(int).tolist()
    parts: list[Rows] = []
    for place in places:
        parts.append(dataset.read_range(*dataset.aligned_range(place, _ROWS_AT_ONCE)))
        if len(dataset.files) > _MAX_OPEN_FILES:
            dataset.close()  # few files are needed again
    return concatenate_rows(parts)


def _repeated_share(rows: Rows, copies: int) -> float:
    found = Counter(row.tobytes() for row in rows.with_originals().input_ids)
    return sum(max(0, count - copies) for count in found.values()) / len(rows)


def text_tokens(rows: Rows) -> np.ndarray:
    """[T] original ids of the text."""
    return rows.with_originals().input_ids[is_text(rows)]


def is_text(rows: Rows) -> np.ndarray:
    """[N, S] whether a token is text: all but padding, [CLS] and [SEP], which are the first token and segment ends."""
    found = rows.input_mask != 0
    found[:, 0] = False
    # The last token of a segment is its [SEP]: the next column is padding or another segment.
    following_mask = np.pad(rows.input_mask[:, 1:], ((0, 0), (0, 1)))
    following_segment = np.pad(rows.segment_ids[:, 1:], ((0, 0), (0, 1)))
    found &= (following_mask != 0) & (following_segment == rows.segment_ids)
    return found


def _token_name(token: int, tokenizer: BertTokenizer | None) -> str:
    found = tokenizer.show(token) if tokenizer else None
    return found if found is not None else f"#{token}"


def _render_row(rows: Rows, number: int, tokenizer: BertTokenizer | None) -> str:
    """A row as text, each prediction as ⟨input←original⟩."""
    row = rows.take(slice(number, number + 1))
    originals = row.with_originals().input_ids[0]
    predicted = set(row.masked_lm_positions[0][row.masked_lm_positions[0] > 0].tolist())
    words = []
    for position in range(int(row.input_mask[0].sum())):
        name = _token_name(int(row.input_ids[0, position]), tokenizer)
        original = _token_name(int(originals[position]), tokenizer)
        words.append(f"⟨{name}←{original}⟩" if position in predicted else name)
    label = {0: "B follows A", 1: "B is random or swapped"}.get(int(row.next_sentence_labels[0]), "no pair")
    if tokenizer is not None and tokenizer.marks_spaces:
        text = re.sub("|".join(SPACE_MARKS), " ", "".join(words))
    else:
        text = " ".join(words).replace(" ##", "")
    return f"({label}) {text}"


def _find_warnings(
    found: Description,
    dataset: PretrainingDataset,
    tokenizer: BertTokenizer | None,
    preparation: Preparation | None,
    has_pairs: bool,
) -> Iterator[str]:
    """Warnings about data on which a loss does not fall, each with a remedy that was not applied already."""
    if tokenizer is not None and dataset.tokenizer_digest not in (None, tokenizer.digest):
        yield (
            "these shards were made with another tokenizer, so the words shown here are wrong. Give the right one with "
            "--vocab_file."
        )
    if found.repeated_rows_share > 0.02:
        yield f"{found.repeated_rows_share:.1%} of rows repeat another row: the text has duplicates" + (
            ", which a model memorizes, or --dupe_factor made copies. Prepare it with `python -m data.prepare`, which "
            "removes duplicates, and --near_duplicates 0.8, which also removes similar documents."
            if preparation is None
            else ", which a model memorizes. Pass --near_duplicates 0.8, which also removes similar documents."
        )
    if found.unknown_share is not None and found.unknown_share > 0.01:
        yield f"{found.unknown_share:.1%} of tokens are unknown: the tokenizer " + (
            "has too few characters of the text. Raise --vocab_size, or --tokenizer_sample_mb."
            if preparation is not None and preparation.has_trained
            else "does not fit the text. Train one with --vocab_size, or check --do_lower_case."
        )
    if found.fill < 0.5:
        yield (
            f"rows are filled to {found.fill:.0%}: documents are very short. Check --layout (blank lines separate "
            "documents, not sentences), or use a smaller --max_seq_length."
        )
    deviation = abs(found.random_next_share - 0.5)
    if has_pairs and deviation > max(0.15, found.rows_looked_at**-0.5):  # two standard errors of few rows
        yield (
            f"{found.random_next_share:.0%} of pairs are labelled 1, expected about half: a document of one sentence "
            "has no next sentence, and a single document has no other to take a random sentence from. Check --layout, "
            "add documents, or use --objective mlm."
        )
    if dataset.is_masked and not 0.05 < found.masked_share < 0.6:
        yield f"{found.masked_share:.1%} of tokens are masked, BERT uses 15 %. Check --masking_rate."
    if found.commonest_tokens and found.commonest_tokens[0][1] > 0.2:
        name, share = found.commonest_tokens[0]
        yield f"{name!r} is {share:.0%} of all tokens: the text is tables or markup, not prose. Clean it."
    if found.split == "training" and found.rows < 5_000:
        yield f"only {counted(found.rows, 'row')} to train on: a model memorizes so little. Add text."
    if tokenizer is not None and found.rows_looked_at >= 10_000 and found.distinct_tokens < 0.3 * tokenizer.vocab_size:
        yield f"{found.distinct_tokens:,} of {tokenizer.vocab_size:,} tokens ever appear. " + (
            "If this is not the tokenizer that made the shards, give that one with --vocab_file; otherwise train a "
            "smaller one."
            if preparation is None
            else "Pass a smaller --vocab_size, or give more text."
        )


def report_files(
    found: Sequence[Description],
    preparation: dict[str, Any] | None = None,
    inputs: Sequence[dict[str, str]] | None = None,
) -> dict[str, str | bytes]:
    """The files of a report: name → content. `inputs`: the files that were read, as what, and how each begins."""
    document = {"preparation": preparation, "splits": [asdict(description) for description in found]}
    document |= {} if inputs is None else {"inputs": list(inputs)}
    shares = {each.split: [count / max(1, each.rows_looked_at) for count in each.lengths] for each in found}
    return {
        "report.json": json.dumps(document, indent=2) + "\n",
        "report.md": render(found, preparation, inputs),
        "lengths.svg": draw_lengths(shares),
    }


def render(
    found: Sequence[Description],
    preparation: dict[str, Any] | None = None,
    inputs: Sequence[dict[str, str]] | None = None,
) -> str:
    """The report as Markdown."""
    lines = [f"# {found[0].folder}", ""]
    if preparation:
        lines += ["## Preparation", "", *_table(preparation), ""]
    if inputs:
        lines += ["## Input", "", *_render_inputs(inputs), ""]
    for description in found:
        lines += _render_split(description)
    return "\n".join(lines)


def _render_inputs(inputs: Sequence[dict[str, str]]) -> list[str]:
    lines = markdown_table(["file", "read as", "begins with"], [[*file.values()] for file in inputs[:_NUM_INPUTS]])
    more = len(inputs) - _NUM_INPUTS
    return [*lines, "", f"{counted(more, 'more file')}: see report.json."] if more > 0 else lines


def _render_split(found: Description) -> list[str]:
    unknown = "unknown (no tokenizer)" if found.unknown_share is None else f"{found.unknown_share:.3%}"
    facts = {
        "rows": f"{found.rows:,} in {counted(found.files, 'file')}",
        "sampled": counted(found.rows_looked_at, "row"),
        "tokens per row, predictions per row": f"{found.max_seq_length}, {found.max_predictions_per_seq}",
        "fill": f"{found.fill:.1%}, about {found.tokens:,} tokens in total",
        "masked": f"{found.masked_share:.1%} of tokens, {found.predictions_a_row:.1f} per row",
        "pairs labelled 1": f"{found.random_next_share:.1%}",
        "unknown tokens": unknown,
        "rows that repeat another": f"{found.repeated_rows_share:.2%}"
        + f", not counting {found.copies} copies" * (found.copies > 1),
        "distinct tokens": f"{found.distinct_tokens:,}",
    }
    return [
        *(f"## {found.split}", "", *_table(facts), ""),
        *(f"**Warning:** {warning}\n" for warning in found.warnings),
        "Most common tokens: " + ", ".join(f"`{name}` {share:.1%}" for name, share in found.commonest_tokens),
        *("", "Rows as text, predictions as ⟨input←original⟩:", ""),
        *(f"> {text}\n" for text in found.instances),
    ]


def _table(facts: dict[str, Any]) -> list[str]:
    shown = {name: f"{value:,}" if isinstance(value, int | float) else value for name, value in facts.items()}
    return markdown_table(["", ""], [(name.replace("_", " "), value) for name, value in shown.items()])
