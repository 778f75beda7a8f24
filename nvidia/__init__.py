"""The model: tensors in, tensors out. Shares its top-level name with pip's CUDA packages, which stay importable."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
