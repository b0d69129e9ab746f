"""Mistakes a user can mend: one sentence each, naming the thing and the allowed values.

The command line prints the sentence and leaves with exit code 2; a library caller sees a ``ValueError``.
Broken invariants of our own are ``assert``s and keep their traceback.
"""


class UserError(ValueError):
    """Base of every mistake that the user, not the program, has to mend."""


class ConfigError(UserError):
    """A key, a type, a value or a combination of them that the configuration does not allow."""


class DataError(UserError):
    """A missing folder, an image that cannot be decoded, or a data set too small for what was asked."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or of another model."""
