"""The place at which the protocol of live looks is documented."""
