"""Profiles: what nodes did inside a `with` block, which of them limits, and what a change would bring."""

from .node_profile import NodeProfile as NodeProfile
from .recording import Profile as Profile
from .recording import profile as profile
from .verdicts.critical_path import CriticalPath as CriticalPath
from .verdicts.limits import Verdict as Verdict
from .verdicts.prediction import Prediction as Prediction
