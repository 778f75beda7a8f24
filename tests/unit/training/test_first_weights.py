"""--use_pretrain through the launcher: a stock checkpoint's weights arrive, or the run says which do not fit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import UserError
from data.shards.dataset import open_dataset
from data.shards.report import text_tokens
from data.shards.statistics import word_vectors
from data.tokenizer import load_tokenizer
from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.export.hugging_face import compare_tokens, export_checkpoint, read_weights

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
         "max_position_embeddings": 32}  # fmt: skip
STEPS = ["--max_steps", "1"]  # of rate 0, at the beginning of the warm-up: the weights stay as they were loaded


def write_stock(
    folder: Path, vocab_size: int = 61, part_size: str = "50GB", **changes: Any
) -> transformers.BertForPreTraining:
    torch.manual_seed(5)
    model = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=vocab_size, **(SIZES | changes)))
    model.save_pretrained(folder, max_shard_size=part_size)
    return model


def newest(folder: Path) -> Path:
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return checkpoints.folder / checkpoints.choose(None)


@pytest.mark.parametrize(("tokens", "words"), [(61, None), (50, "50 … 60 are newly"), (70, "61 … 69 are dropped")])
def test_a_stock_checkpoint_arrives(
    tokens: int, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = write_stock(tmp_path / "stock", tokens, "20KB" if tokens == 61 else "50GB").state_dict()
    assert (tmp_path / "stock" / "model.safetensors").exists() == (tokens != 61)  # otherwise parts and an index
    run_here([*write_project(tmp_path), *STEPS, "--no-preln", "--use_pretrain", str(tmp_path / "stock")])
    said = capsys.readouterr().out
    assert re.search(rf"^  start +from the weights of {tmp_path}/stock$", said, re.MULTILINE)
    assert "so it cannot be checked whether its ids mean the same tokens" in said
    assert ("keep their weights" in said) == (words is not None)
    assert words is None or words in said
    ours, shared = read_weights(newest(tmp_path)), min(tokens, 61)
    for name, theirs in (
        ("bert.encoder.layer.1.intermediate.dense_act.weight", "bert.encoder.layer.1.intermediate.dense.weight"),
        ("bert.pooler.dense_act.bias", "bert.pooler.dense.bias"),
        ("cls.seq_relationship.weight", "cls.seq_relationship.weight"),
    ):
        assert torch.equal(ours[name], stock[theirs])
    table = ours["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(table[:shared], stock["bert.embeddings.word_embeddings.weight"][:shared])
    assert table.shape == (64, 32)


def test_our_export_comes_back_whole_from_the_jsons_bert_model_file(tmp_path: Path) -> None:
    run_here([*write_project(tmp_path / "first"), "--max_steps", "4"])
    export_checkpoint(newest(tmp_path / "first"), tmp_path / "hf", None, None)
    words = write_project(tmp_path / "second")
    path = tmp_path / "second" / "model.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"bert_model_file": str(tmp_path / "hf")}))
    run_here([*words, *STEPS, "--seed", "9", "--use_pretrain"])
    before, after = read_weights(newest(tmp_path / "first")), read_weights(newest(tmp_path / "second"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():  # rows past the 61 tokens are padding, which no export holds
        rows = 61 if len(tensor) == 64 else None
        assert torch.equal(after[name][:rows], tensor[:rows]), name


def test_every_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write_stock(tmp_path / "stock")
    path = tmp_path / "stock" / "model.safetensors"
    tensors = load_file(path)
    del tensors["bert.encoder.layer.0.output.dense.bias"]
    tensors["bert.encoder.layer.0.surprise"] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    words = [*write_project(tmp_path), *STEPS, "--no-preln", "--use_pretrain", str(tmp_path / "stock")]
    with pytest.raises(UserError) as caught:
        run_here(words)
    assert f"{tmp_path / 'stock'}: " in str(caught.value)
    assert "missing: bert.encoder.layer.0.output.dense.bias" in str(caught.value)
    assert "unknown: bert.encoder.layer.0.surprise" in str(caught.value)
    write_stock(tmp_path / "stock")
    tensors = load_file(path)
    tensors["bert.pooler.dense.bias"] = torch.zeros(7)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"wrong shape: bert.pooler.dense_act.bias is \[7\], expected \[32\]"):
        run_here(words)
    write_stock(tmp_path / "stock", num_hidden_layers=3, layer_norm_eps=1e-5)
    with pytest.raises(UserError, match=r"(?s)num_hidden_layers is 3, but.*layer_norm_eps is 1e-05, but"):
        run_here(words)


@pytest.mark.parametrize("changed", [None, "[unused1]", "word1"])
def test_tokens_at_the_same_ids_are_compared(changed: str | None, tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "word1", "word2"]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    ours = [token if token != changed else "other" for token in tokens] + ["more"]
    (tmp_path / "ours.txt").write_text("".join(f"{token}\n" for token in ours))
    tokenizer = load_tokenizer(tmp_path / "ours.txt")
    if changed == "word1":
        with pytest.raises(UserError, match=r"at 1 of 7 shared ids .*id 6: 'word1' there, 'other' here"):
            compare_tokens(tmp_path, tokenizer)
    else:
        assert compare_tokens(tmp_path, tokenizer) == []
    (note,) = compare_tokens(tmp_path / "none", tokenizer)
    assert "contains no readable tokenizer" in note


def test_the_decoder_bias_starts_from_token_frequencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write_project(tmp_path), *STEPS, "--set", "bert_model_config.decoder_bias_init=unigram"]
    run_here(words)
    assert "from new weights, the decoder bias from token frequencies" in capsys.readouterr().out
    bias = read_weights(newest(tmp_path))["cls.predictions.bias"]
    dataset = open_dataset([tmp_path / "data"], split="training", max_seq_length=24, max_predictions_per_seq=4)
    counts = np.bincount(text_tokens(dataset.read_range(0, dataset.num_rows)), minlength=61)
    assert bias[:61].exp().numpy() == pytest.approx((counts + 1) / (counts + 1).sum(), rel=1e-5)
    assert not bias[61:].any()
    run_here([*words, "--max_steps", "2"])
    assert "from new weights" not in capsys.readouterr().out


def test_the_word_embeddings_start_from_neighbouring_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_project(tmp_path)
    run_here([*words, *STEPS, "--set", "bert_model_config.embedding_init=cooccurrence"])
    assert "from new weights, the word embeddings from neighbouring tokens" in capsys.readouterr().out
    weights = read_weights(newest(tmp_path))["bert.embeddings.word_embeddings.weight"]
    dataset = open_dataset([tmp_path / "data"], split="training", max_seq_length=24, max_predictions_per_seq=4)
    vectors = word_vectors(dataset, 61, weights.shape[1])
    known = vectors.any(1)
    assert known.sum() > 30
    assert weights[:61].numpy()[known] == pytest.approx(0.02 * vectors[known], abs=1e-5)
    assert weights[:61][~known].any(dim=1).all()
    run_here([*words, "--max_steps", "2"])  # a JSON that starts new weights in another way does not prevent resuming
    assert "from new weights" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["XLMRoberta", "ModernBert"])
def test_the_architecture_comes_from_the_folder_and_the_export_is_of_its_class(kind: str, tmp_path: Path) -> None:
    """The model JSON has data and schedule only; --preln, which is on, does not matter."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 61, **SIZES, "pad_token_id": 0, "type_vocab_size": 2}
    own = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
    config = getattr(transformers, f"{kind}Config")(**(sizes | own if kind == "ModernBert" else sizes))
    stock = getattr(transformers, f"{kind}ForMaskedLM")(config)
    stock.save_pretrained(tmp_path / "stock")
    words = write_project(tmp_path)
    content = json.loads((tmp_path / "model.json").read_text())
    del content["bert_model_config"]
    (tmp_path / "model.json").write_text(json.dumps(content))
    run_here([*words, *STEPS, "--use_pretrain", str(tmp_path / "stock"), "--export_dir", str(tmp_path / "hf")])
    exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert type(exported) is type(stock)
    used = {name: tensor for name, tensor in stock.state_dict().items() if "position_embeddings" not in name}
    assert all(torch.equal(exported.state_dict()[name], tensor) for name, tensor in used.items())
    with pytest.raises(UserError, match="no bert_model_config; describe the model there, or pass --use_pretrain"):
        run_here([*words, *STEPS, "--job_name", "other"])
