"""The trainer's end of the transport `store`."""

from __future__ import annotations

import logging
import threading
from urllib.parse import quote

from roll.errors import ConfigError, WeightSyncError
from roll.protocols import WeightSource
from roll.types import WeightStore, WeightUpdate
from roll.weights.store.files import StoreFiles
from roll.weights.store.handle import StoreHandle
from roll.weights.store.lineage import Lineage

__all__ = ["StoreSender"]

logger = logging.getLogger(__name__)


class StoreSender:
    """Writes weights to a store. Between syncs, rank 0 keeps one copy of the weights in host memory, for deltas.

    After a failed sync, the next sync writes a full copy.
    """

    def __init__(self) -> None:
        self._store: WeightStore | None = None
        self._lineages: dict[str | None, Lineage] = {}
        self._checksums: dict[str, int] = {}
        self._failed = threading.Event()
        self._is_open = False
        """True if this rank has written to the store."""

    def select_store(self, store: WeightStore | None) -> None:
        """Set the store of the following syncs.

        Raises:
            ConfigError: the store is `None`.
        """
        if store is None:
            raise ConfigError("weight_sync.transport is 'store', but weight_sync.store is not set: set it to a URL.")
        self._store = store

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Write all weights to the store; return the update, or `None` on ranks other than 0."""
        store = self._store
        assert store is not None, "`select_store` is called before `stage`"
        if self._failed.is_set():
            self._failed.clear()
            for lineage in self._lineages.values():
                lineage.discard_chain()
        # "=" never occurs in a quoted name, so an adapter may have any name.
        name = "policy" if store.adapter is None else f"adapter={quote(store.adapter, safe='')}"
        lineage = self._lineages.setdefault(store.adapter, Lineage(f"{store.session}/{name}"))
        changes = lineage.collect(source, store.full_copy_every)
        if changes is None:
            return None
        self._checksums = lineage.checksums
        num_written_bytes = 0
        # A new engine gets weights that are in the store already.
        if not (lineage.chain and changes.num_changed == 0 and lineage.policy_version == policy_version):
            files = StoreFiles(store.url, self._failed.is_set)
            self._begin_session(files, store)
            lineage.publish(files, policy_version, changes)
            num_written_bytes = lineage.chain[-1].num_bytes + lineage.chain[-1].manifest_bytes
        return WeightUpdate(
            policy_version=policy_version,
            manifest=lineage.specs,
            transport="store",
            handle=StoreHandle(
                url=store.url,
                directory=lineage.directory,
                chain=lineage.chain,
                num_elements=sum(spec.num_elements for spec in lineage.specs),
                num_changed=changes.num_changed,
                num_written_bytes=num_written_bytes,
                local_dir=store.local_dir,
            ),
        )

    def send(self) -> dict[str, int]:
        """Return the checksums by tensor name; `stage` has already written all files."""
        return self._checksums

    def release(self, failed: bool) -> None:
        """After a failed sync, end a `stage` that still runs in another thread."""
        if failed:
            self._failed.set()

    def close(self) -> None:
        """Delete all files of this session from the store."""
        if self._is_open and self._store is not None:
            self._is_open = False
            _delete_session(StoreFiles(self._store.url), self._store.session)

    def _begin_session(self, files: StoreFiles, store: WeightStore) -> None:
        if not self._is_open and store.previous_session:
            _delete_session(files, store.previous_session)
        self._is_open = True


def _delete_session(files: StoreFiles, session: str) -> None:
    try:
        files.delete(session)
    except WeightSyncError as error:
        logger.warning("weights of this run remain in the store, delete them by hand: %s", error)
