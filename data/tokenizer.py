"""Loads tokenizers, and saves them in files that stock transformers loads."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import UserError
from common.files import write_atomically
from common.words import counted
from data.special_tokens import CLS, SEP, SPECIALS, UNK, find_special_tokens, role_of

# The files that stock transformers looks for in a folder.
VOCABULARY_FILE, JSON_FILE, CONFIG_FILE, ROLES_FILE = TOKENIZER_FILES = (
    "vocab.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
SPACE_MARKS = ("▁", "Ġ")  # how SentencePiece and byte-level vocabularies write a space
CONTINUATION = "##"
_MAX_LENGTH = 512


class BertTokenizer:
    """A `tokenizers.Tokenizer` of any kind, and the properties of it that BERT pretraining needs."""

    pad_id: int
    unk_id: int | None  # None: every text has tokens, as in byte-level vocabularies
    cls_id: int
    sep_id: int
    mask_id: int

    def __init__(self, backend: Tokenizer, declared: Mapping[str, Any] | None = None) -> None:
        """`declared`: the content of tokenizer_config.json, which may name the special tokens."""
        self._description: dict[str, Any] = json.loads(backend.to_str(pretty=False))
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = find_special_tokens(backend, self._description, declared or {})
        for name in SPECIALS:
            token = self.special_tokens.get(name)
            setattr(self, f"{role_of(name)}_id", None if token is None else backend.token_to_id(token))

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

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that are never masked nor drawn at random: all that the tokenizer marks as special."""
        marked = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        return tuple(sorted(marked | {self.vocabulary[token] for token in self.special_tokens.values()}))

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """The ids that continue a word: those with WordPiece's prefix, or without the mark of a space (Ġ, ▁).

        Empty if tokens show neither. Shards with word starts do not need them.
        """
        if isinstance(self.backend.model, models.WordPiece):
            prefix = self.backend.model.continuing_subword_prefix
            continues = {token for token in self.vocabulary if token.startswith(prefix) and token != prefix}
        elif self.marks_spaces:
            continues = {token for token in self.vocabulary if not token.startswith(SPACE_MARKS)}
        else:
            return ()
        return tuple(sorted({self.vocabulary[token] for token in continues}.difference(self.special_ids)))

    @cached_property
    def marks_spaces(self) -> bool:
        """Whether the token at the beginning of a word starts with the mark of the space before it."""
        return bool({"ByteLevel", "Metaspace"} & self._splitters)

    @cached_property
    def keeps_first_space(self) -> bool:
        """Whether a word has other tokens after a space than at the beginning of a text."""
        after_space, first = (self.backend.encode(text, add_special_tokens=False).ids for text in (" a", "a"))
        return after_space != first

    def show(self, token_id: int) -> str | None:
        """A token for people: bytes as the characters that they stand for, a space before the word as its mark."""
        token = self.backend.id_to_token(token_id)
        if token is None or "ByteLevel" not in self._splitters or token_id in self.special_ids:
            return token
        text = self.backend.decode([token_id], skip_special_tokens=False)
        return token if "\N{REPLACEMENT CHARACTER}" in text else text.replace(" ", SPACE_MARKS[1])

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

    def save(self, folder: Path, max_length: int = _MAX_LENGTH, has_segments: bool = True) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` looks for.

        `max_length` is where stock code truncates: the number of positions of the model. `has_segments`: whether the
        model accepts token_type_ids.
        """
        folder.mkdir(parents=True, exist_ok=True)
        names = {f"{role_of(name)}_token": token for name, token in self.special_tokens.items()}
        inputs = ["input_ids", *(["token_type_ids"] if has_segments else []), "attention_mask"]
        settings: dict[str, Any] = {**names, "model_max_length": max_length, "model_input_names": inputs}
        settings["tokenizer_class"] = "BertTokenizer" if self.is_bert else "PreTrainedTokenizerFast"
        if self.is_bert:
            normalizer = self._description["normalizer"] or {}
            settings |= {
                "do_lower_case": self.lower_case,
                "strip_accents": normalizer.get("strip_accents"),
                "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
            }
        if isinstance(self.backend.model, models.WordPiece):
            by_id = sorted(self.vocabulary.items(), key=lambda item: item[1])
            write_atomically(folder / VOCABULARY_FILE, "".join(f"{token}\n" for token, _ in by_id))
        else:  # of another tokenizer
            (folder / VOCABULARY_FILE).unlink(missing_ok=True)
        write_atomically(folder / JSON_FILE, self.backend.to_str(pretty=True))
        write_atomically(folder / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")
        write_atomically(folder / ROLES_FILE, json.dumps(names, indent=2) + "\n")

    @cached_property
    def _splitters(self) -> set[str | None]:
        """Types of the pre-tokenizers."""
        whole = self._description["pre_tokenizer"] or {}
        return {part.get("type") for part in whole.get("pretokenizers", [whole])}


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


def _load_folder(folder: Path, lower_case: bool | None) -> BertTokenizer:
    if lower_case is None and (folder / CONFIG_FILE).is_file():
        lower_case = _read_json(folder / CONFIG_FILE).get("do_lower_case")
    for name in (JSON_FILE, VOCABULARY_FILE):
        if (folder / name).is_file():
            return load_tokenizer(folder / name, lower_case=lower_case)
    raise UserError(
        f"{folder}: has neither {JSON_FILE} nor {VOCABULARY_FILE}; give a folder with one of them. In transformers, "
        f"AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) converts other files"
    )


def _load_json(path: Path, lower_case: bool | None) -> BertTokenizer:
    _read_json(path)
    beside = [path.parent / name for name in (ROLES_FILE, CONFIG_FILE)]
    declared = {key: value for file in beside if file.is_file() for key, value in _read_json(file).items()}
    try:
        tokenizer = BertTokenizer(Tokenizer.from_file(str(path)), declared)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        raise UserError(
            f"{path}: is not a tokenizer of the tokenizers library ({error}); save it again with its save() or with "
            f"save_pretrained()"
        ) from error
    if lower_case is not None and tokenizer.is_bert and tokenizer.lower_case != lower_case:
        tokenizer.backend.normalizer = _bert_normalizer(lower_case)
        return BertTokenizer(tokenizer.backend, declared)
    return tokenizer


def _load_vocabulary(path: Path, lower_case: bool | None) -> BertTokenizer:
    try:
        tokens = [token.rstrip("\r") for token in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not a vocabulary in UTF-8 ({error.reason}); give a vocab.txt with one token per line"
        ) from error
    repeated = len(tokens) - len(set(tokens))
    if repeated:
        raise UserError(
            f"{path}: has {counted(repeated, 'repeated token')}; expected one token per line, each once; fix the file"
        )
    missing = [name for name in SPECIALS if name not in tokens]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; a BERT vocabulary has all of {', '.join(SPECIALS)}")
    if lower_case is None:
        lower_case = not any(token != token.lower() for token in tokens if not token.startswith("["))
    return bert_from_tokens(tokens, lower_case)


def bert_from_tokens(tokens: Sequence[str], lower_case: bool) -> BertTokenizer:
    """BERT's WordPiece tokenizer with this vocabulary."""
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    add_bert_rules(backend, lower_case)
    return add_special_tokens(backend, SPECIALS)


def add_bert_rules(backend: Tokenizer, lower_case: bool) -> None:
    backend.normalizer = _bert_normalizer(lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)


def _bert_normalizer(lower_case: bool) -> normalizers.Normalizer:
    """Return BERT's normaliser; lower-casing also strips accents (`strip_accents` None follows `lowercase`)."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )


def add_special_tokens(backend: Tokenizer, names: Sequence[str]) -> BertTokenizer:
    """Mark the special tokens as never split, and add [CLS] … [SEP] … [SEP] around encoded text."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, backend.token_to_id(CLS)), (SEP, backend.token_to_id(SEP))],
    )
    return BertTokenizer(backend)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        found = f"contains a JSON {type(content).__name__}"
    except (ValueError, RecursionError) as error:
        found = f"is not valid JSON ({error})"
    raise UserError(f"{path}: {found}; expected an object; copy it again from where it came")
