"""`SignedStore`: the part of a store that belongs to one run. Torch's store asks nobody who connects, so a stranger who
reaches it can write what he wants. What Meshwright writes there is signed with a key that strangers do not have:

    stored(name) = HMAC-SHA256(key, scope ‖ name ‖ value) ‖ value                     `SignedStore.write`, `.read`

so that no value can be invented, moved to another name, or repeated from another attempt, whose scope differs. Names
begin with a text that only the key gives: a process group of torch, whose values are not signed, is thereby out of
reach of a stranger who guesses names, but not of one who lists or deletes them.
"""

from collections.abc import Sequence

import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.files.trust import is_signed_by, sign
from meshwright.processes.torch_private import another_connection

_SIGNATURE_DIGITS = 64
_PREFIX_DIGITS = 32


class StrangerError(CollectiveError):
    """A value in the store was not written by a process of this run."""


class SignedStore(dist.PrefixStore):
    """A store whose values are signed where they are written with `write` and read with `read`. As a `dist.Store` it
    can be handed to torch, whose values are not signed."""

    def __init__(self, store: dist.Store, key: bytes, scope: str = "") -> None:
        super().__init__(sign(key, f"names of {scope}".encode())[:_PREFIX_DIGITS], store)
        self._whole, self._key, self._scope = store, key, scope

    def part(self, name: str) -> "SignedStore":
        """Returns a part of the store with names of its own."""
        return SignedStore(self._whole, self._key, f"{self._scope}/{name}")

    def moved_to(self, store: dist.Store) -> "SignedStore":
        """Returns the part of another store that has the same names and signatures."""
        return SignedStore(store, self._key, self._scope)

    def clone(self) -> "SignedStore":
        """Returns the same store through another connection."""
        return SignedStore(another_connection(self._whole), self._key, self._scope)

    def secret(self, name: str) -> str:
        """Returns a text that only processes of this run can know."""
        return sign(self._key, f"secret\0{self._scope}\0{name}".encode())

    def write(self, name: str, value: str) -> None:
        self.set(name, self.signed(name, value))

    def read(self, name: str) -> bytes:
        """Waits for the value. Raises a `StrangerError` if no process of this run has written it."""
        return self.checked(name, self.get(name))

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        return [self.checked(name, value) for name, value in zip(names, self.multi_get(list(names)), strict=True)]

    def signed(self, name: str, value: str) -> str:
        """Returns what `write` stores."""
        return sign(self._key, self._signed_content(name, value.encode())) + value

    def checked(self, name: str, stored: bytes) -> bytes:
        """Returns the value of what `write` has stored. Raises a `StrangerError` if it was not stored by `write`."""
        signature, content = stored[:_SIGNATURE_DIGITS], stored[_SIGNATURE_DIGITS:]
        if not is_signed_by(self._key, self._signed_content(name, content), signature.decode("latin-1")):
            raise StrangerError(
                f"'{name}' in the store of the ranks was not written with the token of this run: somebody else can"
                " reach the store, and must be kept from it by a private network or a firewall"
            )
        return content

    def _signed_content(self, name: str, content: bytes) -> bytes:
        return b"\0".join((self._scope.encode(), name.encode(), content))


def write(store: dist.Store, name: str, value: str) -> None:
    """Writes a value, signed if the store is a `SignedStore`. Ranks that a launcher on this machine has forked use
    another one, which listens on the loopback address."""
    if isinstance(store, SignedStore):
        store.write(name, value)
    else:
        store.set(name, value)


def read(store: dist.Store, name: str) -> bytes:
    """Returns a value that was written with `write`."""
    return store.read(name) if isinstance(store, SignedStore) else store.get(name)


def read_many(store: dist.Store, names: Sequence[str]) -> list[bytes]:
    """Returns values that were written with `write`."""
    return store.read_many(names) if isinstance(store, SignedStore) else store.multi_get(list(names))
