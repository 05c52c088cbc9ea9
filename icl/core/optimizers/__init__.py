"""Optimisers by their name in the spec, the default first. A new one is a file here and a line in the table."""

from collections.abc import Mapping

from icl.core.optimizer import Optimizer
from icl.core.optimizers.adam import Adam
from icl.core.optimizers.sgd import SGD

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adam": Adam,
    "sgd": SGD,
}
