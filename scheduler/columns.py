"""The columns that indicators and policies compute with: one value per instance."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]


class Columns(Protocol):
    """Indicators by name, one value per instance, and the request's own numbers."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the request's prompt."""

    @property
    def tpot_slo_s(self) -> float:
        """The request's target for the time per token; infinite without one."""

    def __getitem__(self, name: str) -> Column:
        """Return an indicator."""
