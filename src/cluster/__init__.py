"""Nodes on the workers of a cluster, which Ray places: values for `runs_on=`."""

from .._public import public
from .dispatch import Call, Dispatcher, Transport, Worker
from .workers import Workers, ray

__all__ = ["Call", "Dispatcher", "Transport", "Worker", "Workers", "ray"]

__getattr__, __dir__ = public(__name__)
