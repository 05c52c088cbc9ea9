"""What can go wrong with saved things: one class per remedy."""


class StoreError(RuntimeError):
    """A store that cannot be read or written: wrong place, no permission, no credentials."""


class TransientStoreError(StoreError):
    """A storage call that failed for a reason that passes: no answer, too many requests, a full disk."""


class MissingObjectError(StoreError):
    """Nothing is at that path: never published, or removed since somebody looked."""


class RunOwnedError(StoreError):
    """The run is being trained already, by another process or by this one; nothing is wrong."""


class CheckpointError(RuntimeError):
    """Something saved that is missing, damaged, foreign, or does not fit what is asked of it."""


class StoreConflictError(CheckpointError):
    """Two writers computed different bits for the same object; the first stays as it is."""
