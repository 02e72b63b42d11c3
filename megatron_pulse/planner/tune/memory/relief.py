"""Of which layers not all is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relief:
    """The layers that compute ``again`` all that they save, those whose activations wait on the
    ``host``, and those that compute again what is cheap (``selective``); no layer is in two."""

    again: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()
    selective: frozenset[int] = frozenset()

    def __or__(self, other: Relief) -> Relief:
        """Both, of other layers each."""
        return Relief(
            self.again | other.again, self.host | other.host, self.selective | other.selective
        )

    @property
    def computes(self) -> bool:
        """Whether anything is computed again."""
        return bool(self.again or self.selective)
