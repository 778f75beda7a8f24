"""FlexAttention: compiled on devices, and the mask that it gets."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex

from nvidia.attention import flex as backend
from nvidia.attention.sparsity import SparseAttention, SparseHeads
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import make_batch

CAUSAL = SparseAttention.from_dict({"mode": "fixed", "block": 2, "num_local_blocks": 8, "attention": "unidirectional"})


def test_flex_is_compiled_on_devices_and_eager_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager mode the maker of block masks would materialize a mask of all heads and pairs of tokens."""
    compiled: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiled.append((function, options)) or "compiled"
    )
    for choose, function in (
        (backend._kernel, flex.flex_attention),
        (backend._mask_maker, flex.create_block_mask),
    ):
        choose.cache_clear()
        assert choose(False) is function
        assert compiled == []
        assert choose(True) == "compiled"
        assert compiled.pop() == (function, {"dynamic": True})
        choose.cache_clear()


def test_a_compiled_block_mask_is_the_eager_one_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of the CUDA path, traced: one graph gives the eager mask for batches of any size and content."""
    counter = CompileCounter()
    traced = torch.compile(flex.create_block_mask, dynamic=True, backend=counter)
    sparse = SparseHeads(CAUSAL, num_heads=3, kept=(0, 1, 2))
    for lengths in ((11, 7, 11, 1) * 12, (2, 3, 8, 8) * 30):
        packing = plan_packing(make_batch(lengths)[2].bool())
        eager = backend.make_block_mask(packing, sparse)
        assert 0 < float(eager.to_dense().float().mean()) < 1
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_mask_maker", lambda compiled: traced)
            mask = backend.make_block_mask(packing, sparse)
        assert torch.equal(mask.to_dense(), eager.to_dense())
    assert counter.frame_count == 1
