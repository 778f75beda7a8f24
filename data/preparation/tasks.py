"""The tasks that turn pieces of text into shards: encode, cut into instances, write."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np

from data.instances.encoder import Encoder
from data.instances.segments import Documents, Instances, SpecialIds, Text, assemble_rows, join_texts, make_instances
from data.masking import MaskingPolicy, mask_rows
from data.preparation.duplicates import DROPPED
from data.preparation.output import open_output, write_file
from data.preparation.plan import ShardTask, splits_of
from data.preparation.settings import Settings
from data.preparation.work_folder import Job
from data.randomness import derive_key, generator
from data.shards.schema import SPLITS, Rows, concatenate_rows
from data.shards.writer import shard_bytes, shard_name
from data.special_tokens import role_of
from data.tokenizer import BertTokenizer, load_tokenizer

_ROWS_AT_ONCE = 1024  # assembled and masked together: what fits the processor's cache
# An encoder per thread: it learns words as it goes, which two threads must not do in the same table.
_STATE = threading.local()


def encode(job: Job, piece: str) -> dict[str, Any]:
    """Save the token ids of a piece's documents that were kept, separately for each split."""
    folder = job.folder
    keys = folder.load_array("keys", piece)
    is_kept = keys != DROPPED
    documents = [text.split("\n") for text, kept in zip(folder.texts(piece), is_kept, strict=True) if kept]
    keys = keys[is_kept]
    encoder = thread_encoder(job.tokenizer)
    encoded = encoder.encode_documents(documents)
    document_of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])  # [sentences]
    split_of = splits_of(keys, job.settings)[document_of]  # [sentences]
    lengths = np.diff(encoded.ends, prepend=0)  # [sentences]
    kind = np.uint16 if encoder.vocab_size <= 0xFFFF else np.uint32
    num_unknown = int(np.sum(encoded.ids == encoder.tokenizer.unk_id))  # 0 if there is no unknown token
    result: dict[str, Any] = {"splits": {}, "unknown": num_unknown}
    for number, split in enumerate(SPLITS):
        sentences = (split_of == number) & (lengths > 0)
        tokens = np.repeat(sentences, lengths)
        present, num_sentences = np.unique(document_of[sentences], return_counts=True)
        stored = Documents(
            tokens=encoded.ids[tokens].astype(kind),
            word_starts=encoded.word_starts[tokens],
            sentence_ends=np.cumsum(lengths[sentences]),
            document_ends=np.cumsum(num_sentences),
            document_keys=keys[present],
        )
        folder.save_documents(f"{split}-{piece}", stored)
        result["splits"][split] = {
            "documents": len(present),
            "tokens": len(stored.tokens),
            "sole_key": int(keys[present[0]]) if len(present) == 1 else None,
        }
    return result


def cut(job: Job, piece: str, donors: dict[str, str], split: str, length: int) -> dict[str, int]:
    """Cut a piece into instances, one set per copy. `donors` maps a copy to the piece that donates random segments."""
    folder, settings = job.folder, job.settings
    documents = folder.load_documents(f"{split}-{piece}")
    counts = {}
    for copy, donor in donors.items():
        donated = documents if donor == piece else folder.load_documents(f"{split}-{donor}")
        rng = generator(settings.seed, "instances", split, length, int(copy), piece)
        instances = make_instances(documents, donated, settings.objective, length, settings.short_seq_prob, rng)
        folder.save_instances(_instances_name(split, length, int(copy), piece), instances)
        counts[copy] = instances.num_rows
    return counts


def _instances_name(split: str, length: int, copy: int, piece: str) -> str:
    return f"{split}-{length}-{copy}-{piece}"


def write(job: Job, task: ShardTask) -> dict[str, Any]:
    """Assemble, mask and shuffle the rows of one shard, and write it."""
    settings = job.settings
    tokenizer = thread_encoder(job.tokenizer).tokenizer
    rows = _rows_of_shard(job, task, tokenizer)
    name = shard_name(task.split, task.number, task.total)
    content = shard_bytes(rows, _attributes(settings, task, tokenizer), compression=settings.deflate_level)
    write_file(open_output(job.output), f"{task.length}/{name}", content)
    return {
        "name": name,
        "split": task.split,
        "rows": len(rows),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tokens": int(rows.input_mask.sum(dtype=np.int64)),
    }


def _rows_of_shard(job: Job, task: ShardTask, tokenizer: BertTokenizer) -> Rows:
    settings = job.settings
    special = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    seed = derive_key(settings.seed, task.split, task.length)
    policy = MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=task.predictions,
        rate=settings.masking_rate,
        unit=settings.masking_unit,
    )
    text, instances, numbers = _load_shard(job, task)
    order = generator(settings.seed, "shuffle", task.name).permutation(len(numbers))
    found: list[Rows] = []
    for start in range(0, len(order), _ROWS_AT_ONCE):
        chosen = order[start : start + _ROWS_AT_ONCE]
        rows = assemble_rows(text, instances.take(chosen), special, task.length, task.predictions)
        if settings.is_masked(task.split):
            rows = mask_rows(rows, policy, seed=seed, epoch=0, row_numbers=numbers[chosen])
        found.append(rows)
    return concatenate_rows(found)


def _load_shard(job: Job, task: ShardTask) -> tuple[Text, Instances, np.ndarray]:
    """Return the text of all pieces of a shard, its instances as places in that text, and their row numbers."""
    folder = job.folder
    pieces = dict.fromkeys(piece for part in task.ranges for piece in (part.piece, part.donor))
    documents = [folder.load_documents(f"{task.split}-{piece}") for piece in pieces]
    ends = np.cumsum([len(found.tokens) for found in documents]).tolist()
    first_of = dict(zip(pieces, [0, *ends[:-1]], strict=True))
    found: list[Instances] = []
    for part in task.ranges:
        stored = folder.load_instances(_instances_name(task.split, task.length, part.copy, part.piece))
        chosen = stored.take(slice(part.start, part.stop))
        b_first = np.where(chosen.b_is_donated == 1, first_of[part.donor], first_of[part.piece])
        found.append(chosen._replace(a_start=chosen.a_start + first_of[part.piece], b_start=chosen.b_start + b_first))
    numbers = [part.first_number + np.arange(part.stop - part.start) for part in task.ranges]
    instances = Instances(*(np.concatenate(fields) for fields in zip(*found, strict=True)))
    return join_texts(documents), instances, np.concatenate(numbers)


def _attributes(settings: Settings, task: ShardTask, tokenizer: BertTokenizer) -> dict[str, Any]:
    return {
        "max_seq_length": task.length,
        "max_predictions_per_seq": task.predictions,
        "split": task.split,
        "objective": settings.objective,
        "masked": settings.is_masked(task.split),
        "masking_unit": settings.masking_unit,
        "masking_rate": settings.masking_rate,
        "seed": settings.seed,
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": list(tokenizer.special_ids),
        **{f"{role_of(name)}_id": getattr(tokenizer, f"{role_of(name)}_id") for name in tokenizer.special_tokens},
    }


def thread_encoder(tokenizer: str) -> Encoder:
    """Return this thread's encoder, which keeps the words that it has learnt between tasks."""
    version = (tokenizer, (Path(tokenizer) / "tokenizer.json").stat().st_mtime_ns)
    if getattr(_STATE, "version", None) != version:  # a worker may outlive a preparation
        _STATE.encoder, _STATE.version = Encoder(load_tokenizer(Path(tokenizer))), version
    return _STATE.encoder


def release_encoder() -> None:
    """Free the memory of this thread's encoder, tens of megabytes, when there is nothing more to encode."""
    vars(_STATE).clear()
