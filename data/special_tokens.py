"""Which token of a tokenizer has which role: padding, unknown, first, separator, mask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from common.errors import UserError

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIALS = (PAD, UNK, CLS, SEP, MASK)
# Other names of the same five tokens.
_ALIASES = {PAD: (PAD, "<pad>"), UNK: (UNK, "<unk>"), CLS: (CLS, "<s>"), SEP: (SEP, "</s>"), MASK: (MASK, "<mask>")}
_OTHER_KEYS = {CLS: ["bos_token"], SEP: ["eos_token"]}  # of tokenizer_config.json, without cls_token or sep_token
_REMEDIES = {
    PAD: "name one as pad_token in tokenizer_config.json",
    CLS: "name the first token of a row as cls_token in tokenizer_config.json",
    SEP: "name the last token of a row as sep_token in tokenizer_config.json",
    MASK: "add one in transformers with tokenizer.add_special_tokens({'mask_token': '[MASK]'}) and save_pretrained(), "
    "or train a tokenizer with python -m data.prepare --vocab_size N",
}


def role_of(name: str) -> str:
    """[PAD] → pad"""
    return name[1:-1].lower()


def find_special_tokens(
    backend: Tokenizer, description: Mapping[str, Any], declared: Mapping[str, Any]
) -> dict[str, str]:
    """Role (its name in BERT's vocabulary) → token. Only the unknown token may be absent.

    What `declared` (tokenizer_config.json) says comes first, then what the tokenizer's own parts (`description`, the
    content of tokenizer.json) do, then the usual names.
    """
    in_use = _tokens_in_use(description)
    found = {}
    for name in SPECIALS:
        key = f"{role_of(name)}_token"
        candidates = [*_declared(declared, [key, *_OTHER_KEYS.get(name, ())]), *in_use[name], *_ALIASES[name]]
        token = next((token for token in candidates if backend.token_to_id(token) is not None), None)
        if token is not None:
            found[name] = token
        elif name != UNK:
            expected = " or ".join(_ALIASES[name])
            raise UserError(
                f"the tokenizer has no {role_of(name)} token, which pretraining needs; expected {expected}, or another "
                f"one under {key!r} in tokenizer_config.json; {_REMEDIES[name]}"
            )
    return found


def _declared(settings: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        value = settings.get(key)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            yield token


def _tokens_in_use(description: Mapping[str, Any]) -> dict[str, list[str]]:
    """What the parts of a tokenizer.json insert: the post-processor, the model, the padding."""
    found: dict[str, list[str]] = {name: [] for name in SPECIALS}
    processor = description.get("post_processor") or {}
    for part in processor.get("processors", [processor]):
        if "cls" in part and "sep" in part:  # BertProcessing, RobertaProcessing: [token, id]
            found[CLS].append(part["cls"][0])
            found[SEP].append(part["sep"][0])
        template = part.get("single") or []
        if len(template) == 3 and "Sequence" in template[1]:
            for name, piece in ((CLS, template[0]), (SEP, template[2])):
                found[name] += [piece["SpecialToken"]["id"]] if "SpecialToken" in piece else []
    unknown = (description.get("model") or {}).get("unk_token")
    found[UNK] += [unknown] if unknown else []
    padding = (description.get("padding") or {}).get("pad_token")
    found[PAD] += [padding] if padding else []
    added = [token["content"] for token in description.get("added_tokens") or [] if token.get("special")]
    found[MASK] += [token for token in added if "mask" in token.lower()]
    return found
