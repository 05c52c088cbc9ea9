"""The engines by name. A new one is a function in a file of its own, and a line here."""

from collections.abc import Mapping

from icl.engines.local import train_here
from icl.engines.ray import train_on_ray
from icl.engines.training import Engine
from icl.engines.wandb import train_by_wandb

ENGINES: Mapping[str, Engine] = {"local": train_here, "ray": train_on_ray, "wandb": train_by_wandb}
