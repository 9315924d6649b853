"""Things in buckets by a small number, ordered within: what is looked for is found without looking at the rest."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

Item = tuple[int, str]
"""A number to order by, then a name."""


class Buckets:
    """Items in buckets 0, 1, 2, …, in order within each, whatever came first; `counts[k]` is the size of bucket k."""

    __slots__ = ("buckets", "counts")

    def __init__(self) -> None:
        self.buckets: list[SortedList[Item]] = []
        self.counts: list[int] = []

    def add(self, bucket: int, item: Item) -> None:
        """Puts an item in."""
        while bucket >= len(self.buckets):
            self.buckets.append(SortedList())
            self.counts.append(0)
        self.buckets[bucket].add(item)
        self.counts[bucket] += 1

    def remove(self, bucket: int, item: Item) -> None:
        """Takes an item out that is there."""
        self.buckets[bucket].remove(item)
        self.counts[bucket] -= 1

    def first(self, low: int) -> str | None:
        """The first of the lowest bucket from `low` that is not empty."""
        counts = self.counts
        for bucket in range(low, len(counts)):
            if counts[bucket]:
                return self.buckets[bucket][0][1]
        return None

    def upwards(self, low: int, most_each: int) -> Iterator[str]:
        """Names from bucket `low` upwards, at most so many of each."""
        for bucket in range(low, len(self.counts)):
            if self.counts[bucket]:
                for item in self.buckets[bucket].islice(0, most_each):
                    yield item[1]

    def until(self, low: int, limit: int, most_each: int) -> Iterator[str]:
        """Names from bucket `low` upwards, then from below it downwards, whose number is at most `limit`."""
        for bucket in (*range(low, len(self.counts)), *range(low - 1, 0, -1)):
            if bucket < len(self.counts) and self.counts[bucket]:
                for number, name in self.buckets[bucket].islice(0, most_each):
                    if number > limit:
                        break
                    yield name

    def downwards(self, low: int = 1) -> Iterator[str]:
        """Names from the highest bucket down to `low`."""
        for bucket in range(len(self.counts) - 1, low - 1, -1):
            for item in self.buckets[bucket]:
                yield item[1]
