"""Profiles: what nodes did inside a `with` block, and which of them limits."""

from .node_profile import NodeProfile as NodeProfile
from .recording import Profile as Profile
from .recording import profile as profile
from .verdict import Verdict as Verdict
