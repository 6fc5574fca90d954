"""Regions: neighbouring device nodes that become one program."""
