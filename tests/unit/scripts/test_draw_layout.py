"""The pixels of the picture show the layout."""

from pathlib import Path

import matplotlib.image
import pytest

from common.errors import UserError
from scripts.draw_layout import main
from tests.support import write_json


def test_the_picture_shows_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 1, "global_block_indices": []}
    config = write_json(tmp_path / "ds.json", {"train_batch_size": 8, "sparse_attention": block})
    output = tmp_path / "pictures" / "layout.png"
    main([str(config), "--output", str(output), "--max_seq_length", "128"])
    assert "12.5% of the blocks" in capsys.readouterr().out  # the diagonal of 8 × 8
    pixels = matplotlib.image.imread(output)[..., :3]
    # The color of 1 in the color map; letters and lines are black or white.
    blue = (pixels[..., 2] - pixels[..., 0] > 0.2).nonzero()
    assert len(blue[0]) > 1000
    height = blue[0].max() - blue[0].min() + 1
    assert len(blue[0]) == pytest.approx(height * height / 8, rel=0.05)
    corner = abs((blue[0] - blue[0].min()) - (blue[1] - blue[1].min()))
    assert corner.max() <= height / 8 + 1  # all along the diagonal


def test_different_heads_have_a_panel_each(tmp_path: Path) -> None:
    sizes = []
    for differ in (False, True):
        block = {"mode": "bigbird", "num_random_blocks": 2, "different_layout_per_head": differ}
        config = write_json(tmp_path / "ds.json", {"sparse_attention": block})
        main([str(config), "--output", str(tmp_path / "layout.png"), "--num_attention_heads", "3"])
        sizes.append(matplotlib.image.imread(tmp_path / "layout.png").shape[:2])
    assert sizes[1] == (2 * sizes[0][0], 2 * sizes[0][1])


def test_mistakes(tmp_path: Path) -> None:
    config = write_json(tmp_path / "ds.json", {"train_batch_size": 8})
    with pytest.raises(UserError, match="has no block"):
        main([str(config), "--output", str(tmp_path / "layout.png")])
    with pytest.raises(UserError, match=r"ends with \.png"):
        main([str(config), "--output", str(tmp_path / "layout.jpg")])
