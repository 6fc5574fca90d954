"""Requests a second of a real web server, with Penstock and by hand: Starlette under uvicorn, load by wrk.

- `by_hand.py`, `by_hand_with_promises.py`, `with_penstock.py`: the same applications, one for each row of the table
- `process.py`: an application in a process of its own, and the cost of a load on it
- `litserve_server.py`, `mosec_server.py`: one row by peers, in an environment of their own
- `load.lua`: the requests that wrk sends, and the numbers that it prints
"""
