"""Logs: structlog events with the ids of the trace that they belong to."""

import structlog
from opentelemetry import trace

_logger: structlog.stdlib.BoundLogger = structlog.get_logger("penstock")


def warning(event: str, **fields: object) -> None:
    """Log a warning, with the trace and span ids of the caller's span if it has one, recorded or not."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:  # not `is_recording`: an unsampled request is looked up by its trace id, too
        fields["trace_id"] = trace.format_trace_id(context.trace_id)
        fields["span_id"] = trace.format_span_id(context.span_id)
    _logger.warning(event, **fields)
