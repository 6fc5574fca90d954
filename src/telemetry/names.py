"""The names of all spans, attributes, events and metrics of Penstock.

Attributes have the names of the OpenTelemetry semantic conventions 1.44, model calls included, where these define one;
all others begin with `penstock.`. Times are in seconds.
"""

SEMANTIC_CONVENTIONS = "1.44.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"
INSTRUMENTATION = "penstock"

# Spans. All names but that of a stream are followed by the name of a graph or node; the span of a node execution has
# the name of its node.
RUN = "penstock.run"
STREAM = "penstock.stream"
BATCH = "penstock.batch"
DEVICE_CALL = "penstock.device_call"
COMPILE = "penstock.compile"
TRANSFER = "penstock.transfer"

# Events.
RETRY = "penstock.retry"
FALLBACK = "penstock.fallback"
FAILOVER = "penstock.failover"
HEDGE = "penstock.hedge"
HEDGE_WON = "penstock.hedge_won"
ITEM_SKIPPED = "penstock.item_skipped"

# Attributes of runs, streams and node executions.
GRAPH = "penstock.graph"
NODE = "penstock.node"
NODES = "penstock.nodes"
FUNCTION = "code.function.name"
ITEM = "penstock.item"
ATTEMPT = "penstock.attempt"
OUTCOME = "penstock.outcome"
CACHE = "penstock.cache"
ERROR_TYPE = "error.type"
ERROR_MESSAGE = "exception.message"
ADMISSION_WAIT = "penstock.admission_wait_seconds"
QUEUE_WAIT = "penstock.queue_wait_seconds"
STREAM_ITEMS = "penstock.stream.items"
STREAM_FAILED = "penstock.stream.failed"
STREAM_SKIPPED = "penstock.stream.skipped"

# Attributes of what happens on devices.
DEVICE = "penstock.device"
DEVICE_WAIT = "penstock.device_wait_seconds"
DISPATCH_SECONDS = "penstock.dispatch_seconds"
DEVICE_SECONDS = "penstock.device_seconds"
BATCH_ITEMS = "penstock.batch.items"
BATCH_ROWS = "penstock.batch.rows"
BATCH_ITEM_TOKENS = "penstock.batch.item_tokens"
BATCH_TOKENS = "penstock.batch.tokens"
ARGUMENTS = "penstock.compile.arguments"
TRANSFER_BYTES = "penstock.transfer.bytes"

# Attributes of model calls.
OPERATION = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CHAT = "chat"

# Metrics.
METRIC_RUN_DURATION = "penstock.run.duration"
METRIC_RUN_IN_FLIGHT = "penstock.run.in_flight"
METRIC_STREAM_DURATION = "penstock.stream.duration"
METRIC_STREAM_ITEMS = "penstock.stream.items"
METRIC_STREAM_IN_FLIGHT = "penstock.stream.in_flight"
METRIC_STREAM_MAX_IN_FLIGHT = "penstock.stream.max_in_flight"
METRIC_DEPLOYMENT_IN_FLIGHT = "penstock.deployment.in_flight"
METRIC_DEPLOYMENT_MAX_IN_FLIGHT = "penstock.deployment.max_in_flight"
METRIC_DEPLOYMENT_QUEUED = "penstock.deployment.queued"
METRIC_DEPLOYMENT_REFUSED = "penstock.deployment.refused"
METRIC_NODE_EXECUTIONS = "penstock.node.executions"
METRIC_NODE_BUSY_TIME = "penstock.node.busy_time"
METRIC_NODE_RETRIES = "penstock.node.retries"
METRIC_NODE_FAILOVERS = "penstock.node.failovers"
METRIC_NODE_HEDGES = "penstock.node.hedges"
METRIC_NODE_HEDGES_WON = "penstock.node.hedges.won"
METRIC_NODE_CACHE_CALLS = "penstock.node.cache.calls"
METRIC_NODE_CACHE_EVICTIONS = "penstock.node.cache.evictions"
METRIC_NODE_CACHE_SIZE = "penstock.node.cache.size"
METRIC_NODE_RESTARTS = "penstock.node.restarts"
METRIC_NODE_IN_FLIGHT = "penstock.node.in_flight"
METRIC_NODE_MAX_IN_FLIGHT = "penstock.node.max_in_flight"
METRIC_QUEUE_DEPTH = "penstock.queue.depth"
METRIC_QUEUE_CAPACITY = "penstock.queue.capacity"
METRIC_QUEUE_SIZE = "penstock.queue.size"
METRIC_QUEUE_PUT_WAIT_TIME = "penstock.queue.put_wait_time"
METRIC_BATCH_RUNS = "penstock.batch.runs"
METRIC_BATCH_ITEMS = "penstock.batch.items"
METRIC_BATCH_ELEMENTS = "penstock.batch.elements"
METRIC_DEVICE_BUSY_TIME = "penstock.device.busy_time"
METRIC_DEVICE_RESTARTS = "penstock.device.restarts"
METRIC_COMPILE_PROGRAMS = "penstock.compile.programs"
METRIC_COMPILE_TIME = "penstock.compile.time"
METRIC_COMPILE_CACHE_HITS = "penstock.compile.cache.hits"
METRIC_COMPILE_CACHE_MISSES = "penstock.compile.cache.misses"
METRIC_COMPILE_CACHE_EVICTIONS = "penstock.compile.cache.evictions"

# Attributes of metrics.
PADDING = "penstock.padding"
