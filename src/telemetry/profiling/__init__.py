"""Profiles: what nodes did inside a `with` block, which of them limits, and what a change would bring."""

from .critical_path import CriticalPath as CriticalPath
from .limits import Verdict as Verdict
from .node_profile import NodeProfile as NodeProfile
from .prediction import Prediction as Prediction
from .recording import Profile as Profile
from .recording import profile as profile
