"""How many drafts the next block gets: fixed, or by how many were accepted lately.

A block of m drafts that are accepted with probability a each, one after the other, adds
1 + a + ... + a^m tokens. A draft costs an MTP step, and a row more in the verify step, which reads
the experts of another token. The length with the most tokens for its time is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

# Time of one more draft, with its row of the verify step, as a share of an iteration without any.
DRAFT_COST = 0.1
# What an iteration before counts, as a share of the one behind it.
_DECAY = 0.9
# Before anything is known: so many drafts, accepted at this rate.
_PRIOR_DRAFTS, _PRIOR_RATE = 4.0, 0.9
# Another length has to be better by this share: each change runs a graph of its own.
_HYSTERESIS = 0.05


def draft_lengths(longest: int) -> tuple[int, ...]:
    """Lengths to choose from, longest first: each is compiled and captured, so there are few.

    All, half of them, and one; never none, as nothing would be learnt about drafts then.
    """
    return tuple(dict.fromkeys((longest, -(-longest // 2), 1)))


class AdaptiveDraftLength:
    """The number of drafts to propose, from accepted drafts of earlier blocks.

    What is chosen depends on what was accepted and on nothing that is measured, such as time: a
    call is repeatable.

    Args:
        longest: most drafts; the first block has them.

    Attributes:
        length: drafts of the next block.
        rate: estimated probability that a draft is accepted, if all before it were.
    """

    def __init__(self, longest: int) -> None:
        self.lengths = draft_lengths(longest)
        self.length = longest
        self._tried = _PRIOR_DRAFTS
        self._accepted = _PRIOR_DRAFTS * _PRIOR_RATE

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def learn(self, num_drafts: int, kept: Sequence[int]) -> None:
        """Take in a verified block, and choose.

        Args:
            num_drafts: that the block had.
            kept: tokens that each sequence kept, of those that have not ended with the block.
        """
        if not kept:
            return
        self._tried *= _DECAY
        self._accepted *= _DECAY
        for count in kept:
            # The draft behind the last accepted one was tried too, if there was one.
            self._accepted += (count - 1) / len(kept)
            self._tried += min(count, num_drafts) / len(kept)
        best = max(self.lengths, key=self._speed)
        if self._speed(best) > (1 + _HYSTERESIS) * self._speed(self.length):
            self.length = best

    def _speed(self, length: int) -> float:
        """Tokens for the time of an iteration without drafts."""
        tokens = sum(self.rate**i for i in range(length + 1))
        return tokens / (1 + DRAFT_COST * length)
