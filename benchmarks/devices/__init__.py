"""Every workload on devices, in the order of the table."""

from ..harness import Workload
from .batching import BATCHING
from .compilations import COMPILATIONS
from .embedding import EMBEDDING
from .lag import COMPILE_LAG, KERNEL_LAG
from .latency import LATENCY
from .overlap import OVERLAP
from .regions import REGIONS

WORKLOADS: tuple[Workload, ...] = (
    LATENCY,
    KERNEL_LAG,
    COMPILE_LAG,
    BATCHING,
    COMPILATIONS,
    OVERLAP,
    EMBEDDING,
    *REGIONS,
)
