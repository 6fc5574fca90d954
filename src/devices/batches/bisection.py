"""What to run again when a batch failed: smaller batches, until the items that fail are alone."""


class Bisection:
    """Finds the items of a failed batch that fail, and lets the others succeed.

    It runs nothing: run `next_batch()` until there is none, and tell it after each whether that one has `succeeded` or
    `failed`. A search halves what holds a failing item: if the first half succeeds, the other one holds it, and is not
    run as a whole; if it fails, the other one waits, to be run together with everything else that waits when the
    failing item is found. So one failing item of n costs at most ceil(log2 n) + 2 runs, and k of them at most
    k * (ceil(log2 n) + 2). After n runs items run one by one: there are never more than 2 n.

    An item has failed only if it was run alone. If what fails is not the same each time, the bound holds as well.

    Args:
        count: items of the batch.
        error: of the batch; for one of one item, that item's.

    Attributes:
        errors: of the items that failed, by their position in the batch.
    """

    def __init__(self, count: int, error: Exception) -> None:
        self._count = count
        self._runs = 0
        self._batch: list[int] = []  # what runs now
        self._suspects = list(range(count))  # one of them fails
        self._waiting: list[int] = []  # of these, nothing is known
        self.errors: dict[int, Exception] = {}
        if count == 1:
            self._batch = self._suspects
            self.failed(error)

    def next_batch(self) -> list[int]:
        """Return the positions of the items to run next; an empty list if every item has succeeded or failed."""
        if self._runs >= self._count:
            self._waiting = self._suspects + self._waiting
            self._suspects = []
            self._batch = self._waiting[:1]
        elif self._suspects:
            self._batch = self._suspects[: (len(self._suspects) + 1) // 2]
        else:
            self._batch = self._waiting
        self._runs += bool(self._batch)
        return list(self._batch)

    def succeeded(self) -> None:
        """Note that the batch to run has succeeded."""
        self._drop(self._batch)

    def failed(self, error: Exception) -> None:
        """Note that the batch to run has failed."""
        batch = self._batch
        if len(batch) == 1:
            self.errors[batch[0]] = error
        self._waiting += self._suspects
        self._suspects = []
        self._drop(batch)
        if len(batch) > 1:
            self._suspects = batch

    def _drop(self, batch: list[int]) -> None:
        done = set(batch)
        self._suspects = [one for one in self._suspects if one not in done]
        self._waiting = [one for one in self._waiting if one not in done]
