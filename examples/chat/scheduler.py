"""Which tokens a step computes: one for each slot that writes, and parts of prompts within a budget.

It knows neither a clock nor a device. A slot is a row of the model's state, which one request has at a time. Parts of
prompts have few sizes, since each size is a program to compile.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of the prompt in a slot: `length` tokens from `begin` on, filled up with padding to `size`."""

    slot: int
    begin: int
    length: int
    size: int


@dataclass
class Scheduler:
    """Gives slots to requests, and says what each step computes.

    Args:
        slots: how many requests are computed for at a time.
        sizes: the sizes of parts of prompts, in rising order; a step reads no more of prompts, with padding, than the
            last.
    """

    slots: int
    sizes: Sequence[int]
    _left: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # read, and length of prompt

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self.slots - len(self._left)

    def admit(self, length: int) -> int:
        """Give the lowest free slot to a prompt of so many tokens, and return the slot."""
        slot = next(slot for slot in range(self.slots) if slot not in self._left)
        self._left[slot] = (0, length)
        return slot

    def release(self, slot: int) -> None:
        """Take the slot back."""
        del self._left[slot]

    def step(self, able: Container[int]) -> tuple[list[Chunk], list[int]]:
        """Return the parts of prompts that are read now, in order, and the slots that write a token.

        A prompt that came first is read first. A slot writes from the step after the end of its prompt on: the end
        itself gives the first token.

        Args:
            able: the slots that can go on; all others are left out.
        """
        writing = [slot for slot, (read, length) in sorted(self._left.items()) if slot in able and read == length]
        chunks, budget = list[Chunk](), self.sizes[-1]
        for slot, (read, length) in self._left.items():
            while slot in able and read < length and (size := self._size(length - read, budget)):
                chunks.append(Chunk(slot, read, min(size, length - read), size))
                budget -= size
                read += chunks[-1].length
            self._left[slot] = (read, length)
        return chunks, writing

    def _size(self, left: int, budget: int) -> int:
        """Return the size of the next part of a prompt; 0 if the budget has no room for any.

        A pass over the weights is most of the work for a small part: padding of a quarter costs less than another part.
        """
        sizes = [size for size in self.sizes if size <= budget]
        fitting = next((size for size in sizes if size >= left), max(sizes, default=0))
        smaller = [size for size in sizes if size < fitting]
        return smaller[-1] if smaller and fitting - left > fitting // 4 else fitting
