"""What can limit: one module for each kind of resource, and all of them together."""

from .limit import Limit as Limit
from .limit import Verdict as Verdict
from .limits import limits as limits
from .limits import obstacles as obstacles
