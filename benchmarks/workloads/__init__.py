"""Every workload of the table, in the order of the table."""

from ..harness import Workload
from .chain import CHAIN
from .deployment import DEPLOYMENT
from .fan_out import FAN_OUT
from .feeds import FEEDS
from .fold import FOLD, FOLD_MEMORY
from .idle_deployments import IDLE_DEPLOYMENTS
from .io import IO
from .memory import MEMORY
from .node_options import NODE_OPTIONS
from .planning import PLANNING
from .processes import PROCESSES
from .random_graph import RANDOM_GRAPH
from .saving import DURABLE, LARGE_CUTS, MARKS
from .scaling import CHAIN_LENGTH, DEPLOYMENTS, FRAMES_AT_ONCE, STREAM_LENGTH
from .schedulers import SCHEDULING
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
    PROCESSES,
    RANDOM_GRAPH,
    SCHEDULING,
    NODE_OPTIONS,
    PLANNING,
    TELEMETRY,
    FOLD,
    DURABLE,
    MARKS,
    LARGE_CUTS,
    FEEDS,
    MEMORY,
    FOLD_MEMORY,
    IDLE_DEPLOYMENTS,
    CHAIN_LENGTH,
    STREAM_LENGTH,
    FRAMES_AT_ONCE,
    DEPLOYMENTS,
)
