"""Zero-shot tasks of a run: our own model if it can load the weights, else stock transformers."""

from typing import Any

import transformers

from common.errors import UserError
from evaluation.finetuning import ranks
from evaluation.finetuning.finetune import Progress
from evaluation.finetuning.models import ModelFolder, Unavailable, load_model
from evaluation.pseudo_likelihood.likelihood import Masking, Scorer, StockScorer
from evaluation.pseudo_likelihood.minimal_pairs import score_cloze, score_pairs
from evaluation.pseudo_likelihood.native import PackedScorer, load_native, to_native, use_fastest_products
from evaluation.tasks.task import Task
from evaluation.tasks.task_data import TaskData


def make_scorer(model: ModelFolder, task: Task, which: str, untrained: bool, seed: int) -> tuple[Scorer, str]:
    """A scorer and its name, "packed" or "stock"."""
    pad = model.tokenizer.pad_token_id
    if model.tokenizer.mask_token_id is None:
        raise Unavailable(f"the tokenizer of {model.name} has no mask token")
    stock = None
    if untrained:
        transformers.set_seed(seed)
        stock = load_model(model, task.kind, 0, untrained=True)
    if which != "stock":
        try:
            native = (
                load_native(model.path) if stock is None else to_native(stock.state_dict(), stock.config.to_dict(), "")
            )
            if ranks.device().type == "cpu":
                use_fastest_products(native)
            return PackedScorer(native.to(ranks.device()), pad), "packed"
        except UserError as error:
            if which == "packed":
                raise UserError(f"--scorer packed: {error}. Pass --scorer stock.") from None
    stock = stock or load_model(model, task.kind, 0, untrained=False)
    return StockScorer(stock.to(ranks.device()), pad), "stock"


def all_ranks_score_zero_shot(
    model: ModelFolder,
    data: TaskData,
    masking: Masking,
    which: str,
    seed: int,
    progress: Progress,
    *,
    untrained: bool = False,
) -> dict[str, Any]:
    """Values per row for each metric, and which scorer gave them. Each rank takes a run of the rows."""
    scorer, name = make_scorer(model, data.task, which, untrained, seed)
    predictions, num_shortened = {}, {}
    total, done = sum(len(rows) for rows in data.dev.values()), 0

    def report(count: int) -> None:
        nonlocal done
        done += count * ranks.num_ranks()
        progress(min(1.0, done / total))

    for split, rows in data.dev.items():
        first, last = (len(rows) * part // ranks.num_ranks() for part in (ranks.rank(), ranks.rank() + 1))
        values, shortened = _score_rows(scorer, model, data.task, rows[first:last], masking, report)
        values = [ranks.all_ranks_gather(part) for part in values]
        metrics = ("accuracy", "accuracy_of_mean" if data.task.kind == "minimal_pairs" else "reciprocal_rank")
        predictions[split] = dict(zip(metrics, values, strict=True))
        num_shortened[split] = sum(ranks.all_ranks_gather([shortened]))
    return {"predictions": predictions, "losses": [], "steps": 0, "num_shortened": num_shortened, "scorer": name}


def _score_rows(
    scorer: Scorer, model: ModelFolder, task: Task, rows: list[dict[str, Any]], masking: Masking, report: Any
) -> tuple[list[list[float]], int]:
    if not rows:
        return [[], []], 0
    if task.kind == "minimal_pairs":
        pairs = [(row["good"], row["bad"]) for row in rows]
        scored = score_pairs(
            scorer, model.tokenizer, pairs, masking=masking, max_positions=model.max_positions, progress=report
        )
        return [scored.by_sum.tolist(), scored.by_mean.tolist()], scored.num_shortened
    cloze = score_cloze(scorer, model.tokenizer, rows, max_positions=model.max_positions)
    report(len(rows))
    return [cloze.correct.tolist(), cloze.reciprocal_ranks.tolist()], cloze.num_shortened
