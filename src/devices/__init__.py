"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from .jax_types import Device as Device
from .self_check import SelfCheckResult as SelfCheckResult
