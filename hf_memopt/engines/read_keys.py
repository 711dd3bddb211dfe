"""A mapping that remembers what was looked for in it: how a library is asked which keys it reads."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping
from typing import Any


class ReadKeys(dict):
    """A nested mapping, every part of which remembers.

    Attributes:
        log: the keys that were looked for, in their order, each with the keys that lead to it.
    """

    def __init__(self, content: Mapping[str, Any], keys: tuple = (), log: list[tuple] | None = None) -> None:
        self._keys, self.log = keys, [] if log is None else log
        blocks = {key: value for key, value in content.items() if isinstance(value, Mapping)}
        nested = {key: ReadKeys(block, (*keys, key), self.log) for key, block in blocks.items()}
        super().__init__({**content, **nested})

    def __getitem__(self, key):
        self.log.append((*self._keys, key))
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        self.log.append((*self._keys, key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator:
        for key in super().__iter__():
            self.log.append((*self._keys, key))
            yield key

    def get(self, key, default=None):
        self.log.append((*self._keys, key))
        return super().get(key, default)

    def keys(self):
        return KeysView(self)

    def items(self):
        return ItemsView(self)

    def __copy__(self):
        return self
