"""The protocol of the socket, and the client that speaks it: see `penstock.studio.live.protocol`."""

from ...studio.live.protocol import Client, ProtocolError

__all__ = ["Client", "ProtocolError"]
