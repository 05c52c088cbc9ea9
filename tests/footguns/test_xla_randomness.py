"""What torch_xla's generator does, pinned: docs/randomness.md rests on it."""

import pytest

from tests.contract.test_backends import XLA_WHEELS


@pytest.mark.skipif(not XLA_WHEELS, reason="torch_xla has wheels for Linux on x86_64 only")
def test_what_docs_randomness_says() -> None:
    """Earlier trainers, fault 14: seeds silently not applied on XLA for half a year."""
    from benchmarks.xla_randomness import findings

    assert [statement for statement, holds in findings().items() if not holds] == []
