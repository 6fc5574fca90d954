"""Ratios against hand-written asyncio and against peers, measured interleaved in one run.

- `baselines/`: the same work by hand, as a careful person writes it: plain asyncio, no penstock
- `workloads/`: the rows of the table: penstock beside its baseline
- `harness.py`: interleaved rounds of contenders on one loop
- `fresh.py`: rounds in which each sample needs a process of its own
- `summary.py`: medians, bootstrap intervals, limits
- `report.py`: the table on the terminal and the JSON file
- `picture.py`, `tables.py`: the committed results as pictures and as tables for the docs
- `servers/`: web servers under load, with Penstock and by hand
- `peers/`: other frameworks on the same workloads, in an environment of their own
- `encoders/`: other encoders of the same texts, in another environment
- `install.py`: fills these two environments
"""
