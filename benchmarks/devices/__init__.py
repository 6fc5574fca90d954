"""All workloads on devices, in the order of the table."""

from ..harness import Workload
from .batching import BATCHING
from .buffers import BUFFERS
from .compilations import COMPILATIONS
from .embedding import EMBEDDING
from .lag import COMPILE_LAG, KERNEL_LAG
from .latency import LATENCY
from .mesh_stages import MESH_STAGES
from .overlap import OVERLAP
from .regions import REGIONS
from .stages import COMPOSED_CHUNKS, STAGES
from .training import TRAINING_LOOP, TRAINING_STEP
from .whole_arrays import DEVICE_LOOP, WHOLE_ARRAYS

WORKLOADS: tuple[Workload, ...] = (
    LATENCY,
    KERNEL_LAG,
    COMPILE_LAG,
    BATCHING,
    COMPILATIONS,
    OVERLAP,
    TRAINING_STEP,
    TRAINING_LOOP,
    MESH_STAGES,
    *EMBEDDING,
    WHOLE_ARRAYS,
    DEVICE_LOOP,
    BUFFERS,
    *REGIONS,
    STAGES,
    COMPOSED_CHUNKS,
)
