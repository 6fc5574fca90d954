"""Every workload of the table, in its order."""

from ..harness import Workload
from .chain import CHAIN
from .deployment import DEPLOYMENT
from .fan_out import FAN_OUT
from .feeds import FEEDS
from .fold import FOLD, FOLD_MEMORY
from .idle_deployments import IDLE_DEPLOYMENTS
from .io import IO
from .memory import MEMORY
from .planning import PLANNING
from .random_graph import RANDOM_GRAPH
from .scaling import CHAIN_LENGTH, DEPLOYMENTS, FRAMES_AT_ONCE, STREAM_LENGTH
from .telemetry import TELEMETRY
from .threads import THREADS
from .tokens import TOKENS

WORKLOADS: tuple[Workload, ...] = (
    CHAIN,
    DEPLOYMENT,
    TOKENS,
    FAN_OUT,
    IO,
    THREADS,
    RANDOM_GRAPH,
    PLANNING,
    TELEMETRY,
    FOLD,
    FEEDS,
    MEMORY,
    FOLD_MEMORY,
    IDLE_DEPLOYMENTS,
    CHAIN_LENGTH,
    STREAM_LENGTH,
    FRAMES_AT_ONCE,
    DEPLOYMENTS,
)
