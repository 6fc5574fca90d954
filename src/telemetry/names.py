"""Every span, attribute, event and log name of Penstock, in one place.

Attributes follow the OpenTelemetry semantic conventions 1.44, those of model calls included, where these have a name;
the rest begins with `penstock.`. Times are in seconds.
"""

SEMANTIC_CONVENTIONS = "1.44.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"
INSTRUMENTATION = "penstock"

# Spans. Each name but that of a stream is followed by that of a graph or node; a node execution is named as its node.
RUN = "penstock.run"
STREAM = "penstock.stream"
BATCH = "penstock.batch"
DEVICE_CALL = "penstock.device_call"
COMPILE = "penstock.compile"
TRANSFER = "penstock.transfer"

# Events.
RETRY = "penstock.retry"
FALLBACK = "penstock.fallback"
ITEM_SKIPPED = "penstock.item_skipped"

# Attributes of runs, streams and node executions.
GRAPH = "penstock.graph"
NODE = "penstock.node"
NODES = "penstock.nodes"
FUNCTION = "code.function.name"
ITEM = "penstock.item"
ATTEMPT = "penstock.attempt"
OUTCOME = "penstock.outcome"
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
ARGUMENTS = "penstock.compile.arguments"
TRANSFER_BYTES = "penstock.transfer.bytes"

# Attributes of model calls.
OPERATION = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CHAT = "chat"
