"""Whose fault a mistake is: the section of the configuration that a lower room was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dmjd.errors import ConfigError


@contextmanager
def refusing(section: str) -> Iterator[None]:
    """A lower room's ValueError is about the section of the configuration that it was given."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error
