"""Our package shares its name with the CUDA packages on PyPI: both must be importable."""

import subprocess
import sys
from pathlib import Path


def test_packages_of_the_same_name_stay_importable(tmp_path: Path) -> None:
    other = tmp_path / "nvidia" / "cublas"  # pip's CUDA packages have no __init__.py at the top
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("WHO = 'theirs'\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import nvidia.config, nvidia.cublas; print(nvidia.cublas.WHO)"
    )
    root = Path(__file__).resolve().parents[3]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert answer.stdout.strip() == "theirs", answer.stderr


def test_the_model_needs_neither_deepspeed_nor_data() -> None:
    code = (
        "import sys, nvidia.modeling, nvidia.modelingpreln, nvidia.interop.hugging_face; "
        "print([name for name in ('deepspeed', 'data', 'training', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[3]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert answer.stdout.strip() == "[]", answer.stderr
