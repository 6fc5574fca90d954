"""Spans and their names; knows the API of OpenTelemetry and nothing of the rest of the house."""
