"""Loads and trains BERT tokenizers, and saves them in files that stock transformers loads."""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.errors import UserError
from common.files import write_atomically

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIALS = (PAD, UNK, CLS, SEP, MASK)
MIN_VOCABULARY = len(SPECIALS) + 2
# The files that stock transformers looks for in a folder.
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# Other names of the same five tokens.
_ALIASES = {PAD: (PAD, "<pad>"), UNK: (UNK, "<unk>"), CLS: (CLS, "<s>"), SEP: (SEP, "</s>"), MASK: (MASK, "<mask>")}
_CONTINUATION = "##"
_MAX_LENGTH = 512
_MIN_ALPHABET = 1000  # characters, if a text has so many
_COVERAGE = 0.9999  # share of a text's characters
_LINES_AT_ONCE = 10_000


class BertTokenizer:
    """A `tokenizers.Tokenizer`, and the properties of it that BERT pretraining needs."""

    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = {name: _special(backend, name) for name in SPECIALS}
        for name, token in self.special_tokens.items():
            setattr(self, f"{name[1:-1].lower()}_id", backend.token_to_id(token))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: the number of rows that an embedding table needs."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that determines the ids of a text."""
        return hashlib.sha256(self.backend.to_str(pretty=False).encode()).hexdigest()

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that are never masked nor drawn at random: all that the tokenizer marks as special."""
        marked = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        return tuple(sorted(marked | {self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id}))

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """WordPiece ids that continue a word; empty for other models, whose shards contain word starts instead."""
        if not isinstance(self.backend.model, models.WordPiece):
            return ()
        prefix = self.backend.model.continuing_subword_prefix
        return tuple(sorted(i for token, i in self.vocabulary.items() if token.startswith(prefix) and token != prefix))

    @property
    def lower_case(self) -> bool:
        normalizer = self._description["normalizer"] or {}
        parts = normalizer.get("normalizers", [normalizer])
        return any(part.get("lowercase") or part.get("type") == "Lowercase" for part in parts)

    @property
    def is_bert(self) -> bool:
        """Whether it has BERT's normaliser (with cleaning), BERT's word splitting, and WordPiece."""
        parts = [self._description[part] or {} for part in ("normalizer", "pre_tokenizer", "model")]
        kinds = [part.get("type") for part in parts]
        return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and bool(parts[0].get("clean_text"))

    def save(self, folder: Path, max_length: int = _MAX_LENGTH) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` looks for.

        `max_length` is where stock code truncates: the number of positions of the model.
        """
        folder.mkdir(parents=True, exist_ok=True)
        by_id = sorted(self.vocabulary.items(), key=lambda item: item[1])
        names = {f"{name[1:-1].lower()}_token": token for name, token in self.special_tokens.items()}
        settings: dict[str, Any] = {**names, "model_max_length": max_length}
        if self.is_bert:
            normalizer = self._description["normalizer"] or {}
            settings |= {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": self.lower_case,
                "strip_accents": normalizer.get("strip_accents"),
                "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
            }
        else:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        contents = (
            "".join(f"{token}\n" for token, _ in by_id),
            self.backend.to_str(pretty=True),
            json.dumps(settings, indent=2) + "\n",
            json.dumps(names, indent=2) + "\n",
        )
        for name, content in zip(TOKENIZER_FILES, contents, strict=True):
            write_atomically(folder / name, content)

    @cached_property
    def _description(self) -> dict[str, Any]:
        return json.loads(self.backend.to_str(pretty=False))


def load_tokenizer(path: Path, *, lower_case: bool | None = None) -> BertTokenizer:
    """Load a tokenizer from a vocab.txt, a tokenizer.json, or a folder with one.

    `lower_case` None uses the setting in the files; a bare vocab.txt is cased if one of its words has a capital letter.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path, lower_case)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer; give a vocab.txt, a tokenizer.json or a folder with one of them")
    if path.suffix == ".json":
        return _load_json(path, lower_case)
    return _load_vocabulary(path, lower_case)


def train_tokenizer(texts: Iterable[str], vocab_size: int, lower_case: bool = True) -> BertTokenizer:
    """Train a WordPiece vocabulary of at most `vocab_size` on `texts`, with BERT's rules.

    They are iterated twice and not kept: memory grows only with the number of different words.
    """
    if vocab_size < MIN_VOCABULARY:
        raise UserError(f"--vocab_size {vocab_size} is too small; BERT uses 30522, a small corpus 8192")
    backend = Tokenizer(models.WordPiece(unk_token=UNK))
    _add_bert_rules(backend, lower_case)
    texts = list(texts) if isinstance(texts, Iterator) else texts
    # The trainer numbers "##" characters in the order of a hash table, which differs from run to run, and breaks ties
    # by these numbers. Listing them beforehand, and removing words with any other character, makes the vocabulary a
    # function of the text alone.
    rules = Tokenizer(models.WordPiece())  # a second one, because the trainer locks the one that is trained
    _add_bert_rules(rules, lower_case)
    alphabet = _alphabet(texts, rules, lower_case, vocab_size - len(SPECIALS))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet],
        continuing_subword_prefix=_CONTINUATION,
        show_progress=False,
    )
    backend.train_from_iterator(_of_alphabet(texts, set(alphabet), rules, lower_case), trainer=trainer)
    tokens = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    return _bert_from_tokens([token for token, _ in tokens], lower_case)


def _alphabet(texts: Iterable[str], rules: Tokenizer, lower_case: bool, max_tokens: int) -> list[str]:
    """Return the most frequent characters after normalisation, then "##" and those that can continue a word.

    They cover 99.99 % of the text, and are at least a thousand if the text has so many. That is a thousand for an
    alphabetic language, whatever other characters occur in its texts, and about five thousand for Chinese. Never more
    than `max_tokens` tokens.
    """
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    remaining = iter(texts)
    while lines := list(islice(remaining, _LINES_AT_ONCE)):
        text = _normalise(" ".join(lines), rules, lower_case)
        counts += np.bincount(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), minlength=len(counts))
    counts[ord(" ")] = 0
    commonest = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    enough = int(np.searchsorted(np.cumsum(counts[commonest]), _COVERAGE * counts.sum())) + 1
    beginnings: list[str] = []
    continuations: list[str] = []
    for character in map(chr, commonest[: max(enough, _MIN_ALPHABET)].tolist()):
        continues = _can_continue_word(character, rules)
        if len(beginnings) + len(continuations) + 1 + continues > max_tokens:
            break
        beginnings.append(character)
        continuations += [character] if continues else []
    return sorted(beginnings) + [_CONTINUATION + character for character in sorted(continuations)]


def _of_alphabet(texts: Iterable[str], alphabet: set[str], rules: Tokenizer, lower_case: bool) -> Iterator[str]:
    """Remove the words that contain other characters, which would become [UNK] anyway."""
    known = re.escape("".join(token for token in alphabet if len(token) == 1))
    other = re.compile(rf"[^\s{known}]")
    word = re.compile(rf"\S*[^\s{known}]\S*")
    for text in texts:
        normal = _normalise(text, rules, lower_case)
        yield word.sub(" ", normal) if other.search(normal) else normal


def _normalise(text: str, rules: Tokenizer, lower_case: bool) -> str:
    """Apply BERT's normaliser; for printable ASCII that is only lower-casing, at a hundredth of the cost."""
    if text.isascii() and text.isprintable():
        return text.lower() if lower_case else text
    return rules.normalizer.normalize_str(text)


def _can_continue_word(character: str, rules: Tokenizer) -> bool:
    """Whether it can; punctuation and Chinese characters are words by themselves."""
    return len(rules.pre_tokenizer.pre_tokenize_str(rules.normalizer.normalize_str(f"a{character}a"))) == 1


def _load_folder(folder: Path, lower_case: bool | None) -> BertTokenizer:
    if lower_case is None and (folder / "tokenizer_config.json").is_file():
        lower_case = _read_json(folder / "tokenizer_config.json").get("do_lower_case")
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).is_file():
            return load_tokenizer(folder / name, lower_case=lower_case)
    raise UserError(f"{folder}: has neither tokenizer.json nor vocab.txt; give a folder with one of them")


def _load_json(path: Path, lower_case: bool | None) -> BertTokenizer:
    _read_json(path)
    try:
        tokenizer = BertTokenizer(Tokenizer.from_file(str(path)))
    except UserError:
        raise
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        raise UserError(
            f"{path}: is not a tokenizer of the tokenizers library ({error}); save it again with its save() or with "
            f"save_pretrained()"
        ) from error
    if lower_case is not None and tokenizer.is_bert and tokenizer.lower_case != lower_case:
        tokenizer.backend.normalizer = _bert_normalizer(lower_case)
        return BertTokenizer(tokenizer.backend)
    return tokenizer


def _load_vocabulary(path: Path, lower_case: bool | None) -> BertTokenizer:
    try:
        tokens = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not a vocabulary in UTF-8 ({error.reason}); give a vocab.txt with one token per line"
        ) from error
    if tokens[-1] == "":
        tokens.pop()
    tokens = [token.rstrip("\r") for token in tokens]
    repeated = len(tokens) - len(set(tokens))
    if repeated:
        raise UserError(
            f"{path}: {repeated} tokens occur more than once; expected one token per line, each once; fix the file"
        )
    missing = [name for name in SPECIALS if name not in tokens]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; a BERT vocabulary has all of {', '.join(SPECIALS)}")
    if lower_case is None:
        lower_case = not any(token != token.lower() for token in tokens if not token.startswith("["))
    return _bert_from_tokens(tokens, lower_case)


def _bert_from_tokens(tokens: Sequence[str], lower_case: bool) -> BertTokenizer:
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    _add_bert_rules(backend, lower_case)
    return _finish_bert(backend)


def _add_bert_rules(backend: Tokenizer, lower_case: bool) -> None:
    backend.normalizer = _bert_normalizer(lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUATION)


def _bert_normalizer(lower_case: bool) -> normalizers.Normalizer:
    """Return BERT's normaliser; lower-casing also strips accents (`strip_accents` None follows `lowercase`)."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )


def _finish_bert(backend: Tokenizer) -> BertTokenizer:
    """Mark the special tokens as never split, and add [CLS] … [SEP] … [SEP] around encoded text."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, backend.token_to_id(CLS)), (SEP, backend.token_to_id(SEP))],
    )
    return BertTokenizer(backend)


def _special(backend: Tokenizer, name: str) -> str:
    for alias in _ALIASES[name]:
        if backend.token_to_id(alias) is not None:
            return alias
    raise UserError(f"the tokenizer has no {name} token, which BERT needs; expected {' or '.join(_ALIASES[name])}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"{path}: is not valid JSON ({error}); expected an object; copy it again from where it came"
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: holds a JSON {type(content).__name__}, expected an object; copy it again from where it came"
        )
    return content
