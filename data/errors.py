"""The one error of this room."""


class DataError(ValueError):
    """Text, token files or settings that cannot be used.

    The message is one line for a person: what was given, what is allowed, what
    to do.
    """
