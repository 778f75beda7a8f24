"""The predict command on an exported model gives the results of our own model."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from common.errors import UserError
from data.tokenizer import TOKENIZER_FILES, BertTokenizer
from data.tokenizer_training import train_tokenizer
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from scripts.predict import encode_pair, load_judge, load_tokenizer, main
from tests.support import run_command
from tests.unit.evaluation.tiny import make_tokenizer
from tests.unit.nvidia.helpers import spread_weights, tiny_config
from training.checkpoints.paths import MANIFEST, STATE
from training.checkpoints.state import TrainingState
from training.export.hugging_face import export_checkpoint
from training.settings.first_weights import EXTRA_WEIGHTS

TEXT = ["the cat sat on the mat", "she opened the door and went outside", "one two three four five six"]
PAIR = ("the cat sat", "she went outside on the mat")


def make_model(kind: type[PreTrainingModel], tokenizer: BertTokenizer, **changes: object) -> PreTrainingModel:
    sizes = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_id, **changes}
    model = kind(tiny_config(**sizes).with_padded_vocab()).eval()
    spread_weights(model)
    return model


def export(model: PreTrainingModel, tokenizer: BertTokenizer, folder: Path) -> Path:
    """Through a checkpoint as the engine writes it at stage 0."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save({"module": model.state_dict()}, checkpoint / "mp_rank_00_model_states.pt")
    state = TrainingState(
        step=7,
        start_step=0,
        samples=56,
        tokens=999,
        seed=42,
        world_size=1,
        zero_stage=0,
        precision="fp32",
        data_digest="",
        tokenizer_digest=tokenizer.digest,
        best_validation_loss=None,
        model_config=model.config.to_dict(),
        is_preln=model.bert.pre_ln,
    )
    (checkpoint / STATE).write_text(json.dumps(asdict(state)))
    (checkpoint / MANIFEST).touch()  # an export locks it
    tokenizer.save(folder / "tokenizer")
    export_checkpoint(checkpoint, folder / "hf", tokenizer, None)
    return folder / "hf"


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return train_tokenizer(TEXT, 90)


def test_an_export_removes_the_files_of_the_previous_one(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    folder = export(make_model(BertForPreTrainingPreLN, tokenizer), tokenizer, tmp_path)
    before = {path.name for path in folder.iterdir()}
    export(make_model(BertForPreTraining, tokenizer), tokenizer, tmp_path)
    assert before - {path.name for path in folder.iterdir()} == {EXTRA_WEIGHTS}
    export_checkpoint(tmp_path / "checkpoint", folder, None, None)
    assert not {path.name for path in folder.iterdir()} & set(TOKENIZER_FILES)


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_a_pair_is_judged_as_by_our_own_model(
    kind: type[PreTrainingModel], tokenizer: BertTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(kind, tokenizer)
    folder = export(model, tokenizer, tmp_path)
    assert (folder / EXTRA_WEIGHTS).is_file() == model.bert.pre_ln
    first, second = (tokenizer.backend.encode(text, add_special_tokens=False).ids for text in PAIR)
    ids = torch.tensor([[tokenizer.cls_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]])
    segments = torch.tensor([[0] * (len(first) + 2) + [1] * (len(second) + 1)])
    with torch.no_grad():
        expected = float(model.sentence_logits(ids, torch.ones_like(ids), segments).softmax(-1)[0, 0])
    stock = load_tokenizer(folder)
    assert torch.equal(encode_pair(stock, *PAIR)["input_ids"], ids)
    assert load_judge(folder).follows(stock, *PAIR) == pytest.approx(expected, abs=1e-6)
    assert 0.001 < expected < 0.999
    swapped = load_judge(folder).follows(stock, PAIR[1], PAIR[0])
    assert abs(swapped - expected) > 1e-3

    assert main(["--model", str(folder), *PAIR]) == 0
    plain = capsys.readouterr().out
    assert plain == f"{PAIR[0]}\n{PAIR[1]}\n    follows {expected:.1%}\n"
    assert main(["--model", str(folder), "--pair", *PAIR, "the [MASK] sat"]) == 0
    both = capsys.readouterr().out
    assert both.endswith(plain)
    assert both.count("%") == 6


def test_texts_that_cannot_be_predicted_are_refused(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    folder = export(make_model(BertForPreTrainingPreLN, tokenizer), tokenizer, tmp_path)
    with pytest.raises(UserError, match="no text"):
        main(["--model", str(folder)])
    with pytest.raises(UserError, match="has no \\[MASK\\]"):
        main(["--model", str(folder), "the cat sat"])
    with pytest.raises(UserError, match="19 positions\\. Shorten"):
        main(["--model", str(folder), "--pair", "the cat " * 9, "the mat"])
    # A model without the head, exported over the one that had it: the old head must not judge for it.
    export(make_model(BertForPreTrainingPreLN, tokenizer, sentence_head="none"), tokenizer, tmp_path)
    with pytest.raises(UserError, match="no next-sentence head"):
        main(["--model", str(folder), *PAIR])


def test_one_wrong_text_does_not_lose_the_answers_for_the_others(
    tokenizer: BertTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(make_model(BertForPreTrainingPreLN, tokenizer), tokenizer, tmp_path)
    texts = ["the [MASK] sat", "no mask here", "she opened the [MASK]"]
    long_pair = ("the cat " * 9, "the mat")
    with pytest.raises(UserError) as caught:
        main(["--model", str(folder), "--pair", *long_pair, "--pair", *PAIR, *texts])
    assert len(caught.value.parts) == 2
    assert "'no mask here': has no [MASK]" in str(caught.value)
    assert "19 positions" in str(caught.value)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if not line.startswith("    ")] == [texts[0], texts[2], *PAIR]
    assert said.count("%") == 11


def test_the_command_starts_without_deepspeed() -> None:
    """Which takes seconds to import; stock transformers is all that a prediction needs."""
    code = "import sys, scripts.predict; assert not {'deepspeed', 'training.engine'} & sys.modules.keys()"
    outcome = run_command([sys.executable, "-c", code])
    assert outcome.returncode == 0, outcome.stderr


def test_a_stock_model_without_the_head_is_refused(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    import transformers

    tokenizer.save(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no next-sentence head"):
        main(["--model", str(tmp_path), *PAIR])


@pytest.mark.parametrize("types", [1, 2])
def test_a_fine_tuned_model_classifies_texts_and_pairs(
    types: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    sizes["type_vocab_size"] = types
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, id2label={0: "bad", 1: "good"}, **sizes)
    classifier = BertForSequenceClassification(config)
    classifier.classifier.bias.data = torch.tensor([-9.0, 9.0])
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "the cat . " * 50, "--pair", "the dog .", "the bird ."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ")] == ["good", "good"]
    assert lines[-3:-1] == ["the dog .", "the bird ."]
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "BertForTokenClassification"))
    with pytest.raises(UserError, match=r"is a TokenClassification model.*token-classification"):
        main(["--model", str(tmp_path), "the [MASK] ."])  # would be answered by a head with fresh weights
