"""Architectures by their name in the spec, the default first. A new one is a file here and a line in the table."""

from collections.abc import Mapping

from icl.core.architecture import Architecture
from icl.core.architectures.linear_attention import LinearAttention
from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus

ARCHITECTURES: Mapping[str, type[Architecture]] = {
    "timaeus": Timaeus,
    "raventos": Raventos,
    "linear_attention": LinearAttention,
}
