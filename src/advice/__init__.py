"""Advice: how fast devices and feeds are, what a machine has, and how many items a call should take."""
