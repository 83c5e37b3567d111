"""Which outer learning rate, for how many replicas."""

from __future__ import annotations


def default_outer_lr(num_replicas: int) -> float:
    """Return the outer learning rate for Nesterov with momentum 0.9.

    The best rate does not depend on the model's size and grows with the number of replicas (arXiv 2503.09799, section
    4 and figure 7: 0.4 to 0.6 for one, 0.6 for 2 and 4, 0.8 for 8, at a sync interval of 30).

    Example:
        >>> default_outer_lr(2), default_outer_lr(8)
        (0.6, 0.8)
    """
    return 0.6 if num_replicas < 8 else 0.8
