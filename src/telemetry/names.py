"""Every span, attribute, event and log name of Penstock, in one place.

Attributes follow the OpenTelemetry semantic conventions 1.39 where these have a name; the rest begins with
`penstock.`.
"""

INSTRUMENTATION = "penstock"

RUN = "penstock.run"
STREAM = "penstock.stream"
RETRY = "penstock.retry"

GRAPH = "penstock.graph"
NODE = "penstock.node"
FUNCTION = "code.function.name"
ITEM = "penstock.item"
ATTEMPT = "penstock.attempt"
OUTCOME = "penstock.outcome"
ERROR_TYPE = "error.type"
