"""Masked image modelling with disjoint masking and joint distillation (DMJD).

Importing the package imports no libraries: ``dmjd.ops`` imports torch only, the other packages their own libraries.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("dmjd")
except PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+source"

__all__ = ["__version__"]
