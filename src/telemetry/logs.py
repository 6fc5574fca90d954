"""Logs: structlog events with the ids of the trace that they belong to."""

from opentelemetry import trace


def warning(event: str, **fields: object) -> None:
    """Log a warning, with the trace and span ids of the caller's span if it has one, recorded or not."""
    # Loaded at the first warning: with rich installed, structlog takes as long to import as the rest of this package.
    import structlog

    context = trace.get_current_span().get_span_context()
    if context.is_valid:  # not `is_recording`: an unsampled request is looked up by its trace id, too
        fields["trace_id"] = trace.format_trace_id(context.trace_id)
        fields["span_id"] = trace.format_span_id(context.span_id)
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("penstock")
    logger.warning(event, **fields)
