"""The one exception of moax's own; a caller's mistake is a ValueError."""


class Unsupported(NotImplementedError):
    """An implementation that was chosen by name cannot do what is asked; the message says why."""
