"""A layout of a user's own: rows of a matrix, on one server and in one slice each."""

import math

from p3kv.slicing.slices import LAYOUTS, Layout


class WholeRows(Layout):
    """A row is what the first index says; a vector's rows have one element each."""

    @property
    def grain_elems(self) -> int:
        return max(1, math.prod(self.shape[1:]))


LAYOUTS.register("rows", WholeRows)
