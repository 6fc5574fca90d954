"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""
