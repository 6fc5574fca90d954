"""Profiles: what nodes did inside a `with` block, and which of them limits."""

from .profile import NodeProfile as NodeProfile
from .profile import Profile as Profile
from .profile import profile as profile
from .verdict import Verdict as Verdict
