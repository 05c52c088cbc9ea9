"""For tests of icl and of backends of other packages, installed with the extra `testing`."""

from icl.testing.contract import BackendContract
from icl.testing.settings import global_generators, hostile_settings, process_settings
from icl.testing.specs import specs, tiny_spec, with_training
from icl.testing.strict import StrictBackend

__all__ = [
    "BackendContract",
    "StrictBackend",
    "global_generators",
    "hostile_settings",
    "process_settings",
    "specs",
    "tiny_spec",
    "with_training",
]
