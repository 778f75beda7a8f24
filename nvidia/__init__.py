"""The model: tensors in, tensors out.

The package shares its name with the CUDA packages on PyPI, which stay importable.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
