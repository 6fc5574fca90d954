"""Dispatch: from calls that wait on an event loop to computations on a device, and back."""
