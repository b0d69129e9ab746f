"""Masked image modelling with disjoint masking and joint distillation (DMJD).

Importing the package imports no libraries: ``dmjd.ops`` imports torch only, the other packages their own libraries.
The names below are loaded on first use; docs/python.md describes them.
"""

from importlib import import_module

_HOMES = {
    "Run": "dmjd.api",
    "ap": "dmjd.api",
    "detect": "dmjd.api",
    "finetune": "dmjd.api",
    "knn": "dmjd.api",
    "linprobe": "dmjd.api",
    "miou": "dmjd.api",
    "pretrain": "dmjd.api",
    "segment": "dmjd.api",
    "validate": "dmjd.api",
    "Classifier": "dmjd.encoder",
    "Encoder": "dmjd.encoder",
    "load_classifier": "dmjd.encoder",
    "load_encoder": "dmjd.encoder",
    "UserError": "dmjd.errors",
    "Embeddings": "dmjd.explore.embeddings",
    "read_embeddings": "dmjd.explore.embeddings",
    "write_comparison": "dmjd.report",
    "write_report": "dmjd.report",
}
"""Public name -> its module. ``__init__.pyi`` lists the same names for type checkers."""

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562)."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'dmjd' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dmjd":
            raise
        raise ImportError(f"dmjd.{name} needs {error.name}; pip install 'dmjd[train]'") from None
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # imports a dozen modules

    try:
        found = version("dmjd")
    except PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
        found = "0+source"
    globals()["__version__"] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
