"""`Unsupported` is the one exception class of moax. A mistake of the caller is a ValueError."""


class Unsupported(NotImplementedError):
    """An implementation that was chosen by name cannot do its task; the message says why."""
