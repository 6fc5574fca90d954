"""What statistics say: differences of two looks, the node that limits, and the tables that they are shown as."""

from .bottleneck import Bottleneck as Bottleneck
