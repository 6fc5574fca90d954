"""Spans, logs, profiles and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""
