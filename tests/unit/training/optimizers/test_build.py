"""Parameter groups, and every optimizer against its plain formula."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.errors import Problems
from nvidia.config import BertConfig
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from training.optimizers.build import build_optimizer, check_optimizer, parameter_groups
from training.optimizers.lamb import Lamb
from training.optimizers.muon import MuonWithAdamW, orthogonalize

STEPS = 5
RATE, DECAY, EPS = 0.03, 0.1, 1e-6
BETAS = (0.9, 0.98)


def small_model(**changes: Any) -> BertForPreTrainingPreLN:
    config = BertConfig(
        vocab_size=40, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, **changes
    )
    return BertForPreTrainingPreLN(config)


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
@pytest.mark.parametrize("split_muon", [False, True])
@pytest.mark.parametrize("position", ["absolute", "relative_key"])
def test_every_parameter_is_in_exactly_one_group(kind: Any, split_muon: bool, position: str) -> None:
    model = kind(small_model(position_embedding_type=position).config)
    model.bert.pooler.dense_act.bias.requires_grad_(False)
    groups = parameter_groups(model, 0.01, split_muon)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(set(grouped)) == len(grouped)


def test_layer_norms_and_biases_do_not_decay_and_muon_takes_linear_layers_of_the_encoder() -> None:
    model = small_model(position_embedding_type="relative_key")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden, decayed, plain = (
        {names[id(parameter)] for parameter in group["params"]} for group in parameter_groups(model, 0.01, True)
    )
    assert all("LayerNorm" in name or name.endswith("bias") for name in plain)
    assert "bert.embeddings.LayerNorm.weight" in plain
    assert all(name.startswith("bert.encoder.layer.") and name.endswith("weight") for name in hidden)
    assert len(hidden) == 2 * 6  # query, key, value, output, and both of the feed-forward layer
    assert "bert.embeddings.word_embeddings.weight" in decayed
    assert any("distance_embedding" in name for name in decayed)


def walk(optimizer_of: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The parameters at the start and after each of some steps on fixed gradients."""
    generator = torch.Generator().manual_seed(7)
    parameters = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((6, 4), (4, 9), (5,))]
    parameters.append(nn.Parameter(torch.zeros(3)))  # its norm is zero, as a fresh bias's is
    start = [parameter.detach().clone() for parameter in parameters]
    optimizer = optimizer_of(parameters)
    history = []
    for gradients in fixed_gradients(start):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in parameters])
    return start, history


def fixed_gradients(like: list[Tensor]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return [[torch.randn(tensor.shape, generator=generator) for tensor in like] for _ in range(STEPS)]


def plain_adam_direction(gradients: list[Tensor], corrected: bool) -> Tensor:
    """Adam's direction after all of `gradients`, straight from the definition, in double precision."""
    mean = sum((1 - BETAS[0]) * BETAS[0] ** age * g.double() for age, g in enumerate(reversed(gradients)))
    square = sum((1 - BETAS[1]) * BETAS[1] ** age * g.double() ** 2 for age, g in enumerate(reversed(gradients)))
    steps = len(gradients)
    if corrected:
        mean, square = mean / (1 - BETAS[0] ** steps), square / (1 - BETAS[1] ** steps)
    return mean / (square.sqrt() + EPS)  # type: ignore[union-attr]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("coefficients", [(0.01, 10.0), (0.2, 0.3), None])
def test_lamb_is_its_formula(corrected: bool, coefficients: tuple[float, float] | None) -> None:
    options: dict[str, Any] = {"bias_correction": corrected, "use_trust_ratio": coefficients is not None}
    if coefficients is not None:
        options.update(min_coeff=coefficients[0], max_coeff=coefficients[1])
    start, history = walk(lambda p: Lamb(p, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options))
    gradients = fixed_gradients(start)
    for index, weight in enumerate(tensor.double() for tensor in start):
        for step in range(STEPS):
            update = plain_adam_direction([g[index] for g in gradients[: step + 1]], corrected) + DECAY * weight
            ratio = torch.tensor(1.0)
            if coefficients is not None and weight.norm() > 0:
                ratio = (weight.norm() / update.norm()).clamp(*coefficients)
            weight = weight - RATE * ratio * update
            torch.testing.assert_close(history[step][index].double(), weight, rtol=1e-5, atol=1e-6)


def test_muon_is_its_formula_on_matrices_and_adamw_elsewhere() -> None:
    def optimizer_of(parameters: list[nn.Parameter]) -> MuonWithAdamW:
        groups = [
            {"params": parameters[:2], "use_muon": True, "weight_decay": DECAY},
            {"params": parameters[2:], "use_muon": False, "weight_decay": 0.0},
        ]
        return MuonWithAdamW(groups, lr=RATE, momentum=0.9, betas=BETAS, eps=EPS)

    start, history = walk(optimizer_of)
    gradients = fixed_gradients(start)
    for index in (0, 1):
        weight, momentum = start[index].double(), torch.zeros_like(start[index]).double()
        for step in range(STEPS):
            gradient = gradients[step][index].double()
            momentum = 0.9 * momentum + 0.1 * gradient
            direction = orthogonalize((0.1 * gradient + 0.9 * momentum).float()[None])[0].double()
            weight = weight * (1 - RATE * DECAY) - RATE * 0.2 * max(weight.shape) ** 0.5 * direction
            torch.testing.assert_close(history[step][index].double(), weight, rtol=1e-4, atol=1e-5)
    _, theirs = walk(lambda p: torch.optim.AdamW(p, lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0))
    for index in (2, 3):
        torch.testing.assert_close(history[-1][index], theirs[-1][index])


def test_orthogonalized_singular_values_are_near_one() -> None:
    matrices = torch.randn(3, 11, 7, generator=torch.Generator().manual_seed(5))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, torch.optim.AdamW),
        ({"type": "AdamW"}, torch.optim.AdamW),
        ({"type": "Adam"}, torch.optim.AdamW),  # DeepSpeed's Adam decays as AdamW does by default
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "Adam", "params": {"bias_correction": False}}, Lamb),
        ({"type": "Lamb", "params": {"max_coeff": 0.3, "bias_correction": False}}, Lamb),
        ({"type": "Muon"}, MuonWithAdamW),
    ],
)
def test_the_block_selects_the_optimizer(block: dict[str, Any] | None, expected: type) -> None:
    optimizer, _ = build_optimizer(small_model(), block, learning_rate=1e-3, weight_decay=0.01, zero={})
    assert type(optimizer) is expected
    if expected is Lamb:
        assert optimizer.defaults["bias_correction"] is False
        assert optimizer.defaults["use_trust_ratio"] is (block is not None and block["type"] == "Lamb")


@pytest.mark.parametrize(
    ("block", "stage", "words"),
    [
        ({"type": "Lamb"}, 1, "Lamb cannot be used with ZeRO stage 1"),
        ({"type": "AdmaW"}, 0, "did you mean 'adamw'?"),
        ({"type": "AdamW", "params": {"beta": [0.9, 0.9]}}, 0, "'optimizer.params.beta'; did you mean 'betas'?"),
        ({"type": "AdamW", "parms": {}}, 0, "'optimizer.parms'; did you mean 'params'?"),
        ({"type": "OneBitAdam"}, 0, "found 'OneBitAdam', expected one of adam, adamw, lamb, muon"),
        ({"type": 3}, 0, "optimizer.type: found 3, expected a string"),
        ({"type": "Muon"}, 2, "Muon cannot be used with zero_optimization.offload_optimizer"),
    ],
)
def test_mistakes_in_the_block(block: dict[str, Any], stage: int, words: str) -> None:
    problems = Problems()
    offload = {"offload_optimizer": {"device": "cpu"}} if stage == 2 else {"offload_optimizer": {"device": "none"}}
    check_optimizer(block, {"stage": stage, **offload}, "ds.json", problems)
    (message,) = problems.messages
    assert words in message
