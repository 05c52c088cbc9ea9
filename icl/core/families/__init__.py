"""Task families by their name in the spec, the default first. A new one is a file here and a line in the table."""

from collections.abc import Mapping

from icl.core.families.linear import LinearTask
from icl.core.families.power_law import PowerLawTask
from icl.core.families.relu_network import ReLUNetworkTask
from icl.core.families.sparse_linear import SparseLinearTask
from icl.core.families.student_t import StudentTTask
from icl.core.family import TaskFamily

FAMILIES: Mapping[str, type[TaskFamily]] = {
    "linear": LinearTask,
    "sparse_linear": SparseLinearTask,
    "relu_network": ReLUNetworkTask,
    "power_law": PowerLawTask,
    "student_t": StudentTTask,
}
