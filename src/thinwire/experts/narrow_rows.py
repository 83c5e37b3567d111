"""Tokens that travel to experts in fewer dimensions, y = (sum_i p_i E_i(x B)) C with one B and C a layer (BigMac)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import refusal
from thinwire.experts.dispatch import Tokens
from thinwire.experts.sharing import Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowRows:
    """Part of a layer's shape, see `ExpertLayer`; the router still reads whole tokens.

    Attributes:
        ratio: Dimensions on the way as a share of the tokens' width. A layer has as many parameters as one of whole
            width, but for the two projections, where its experts are 1/ratio times as wide inside.
        dispatch: What travels, of this width.

    Raises:
        ValueError: The ratio is out of range.

    Reference:
        arXiv 2502.16927, section 4.
    """

    ratio: float = 0.25
    dispatch: Dispatch = Tokens()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        """Check the ratio."""
        if not 0 < self.ratio <= 1:
            raise refusal("ratio is no share of the width", got=self.ratio, allowed="above 0, up to 1",
                          remedy="ratio=0.25")  # fmt: skip

    def width(self, dim: int) -> int:
        """Return the dimensions on the way of tokens of so many."""
        return max(1, round(self.ratio * dim))


def low_rank(*, ratio: float = 0.25, dispatch: Dispatch | None = None) -> NarrowRows:
    """Return the shape of a layer whose tokens travel in fewer dimensions; see `NarrowRows`."""
    return NarrowRows(ratio=ratio, dispatch=Tokens() if dispatch is None else dispatch)
