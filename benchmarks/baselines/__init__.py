"""The same work written by hand with asyncio alone: the reference of every ratio.

No module here imports penstock, so that peers are measured against the same code in an environment of their own. Every
function that measures returns seconds, and checks the results.
"""
