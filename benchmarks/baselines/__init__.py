"""The same work written by hand with asyncio alone: what every ratio is a ratio to.

Nothing here imports penstock, so that peers are measured against the very same code in an environment of their own.
Every function that measures returns seconds and checks what came out.
"""
