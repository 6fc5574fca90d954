"""Ratios against hand-written asyncio and against peers, measured interleaved in one run.

- `baselines/`: what a careful person writes by hand: plain asyncio, no penstock
- `workloads/`: each row of the table: penstock beside its baseline
- `harness.py`: interleaved rounds of contenders on one loop
- `fresh.py`: rounds whose samples need a process of their own
- `summary.py`: medians, bootstrap intervals, limits
- `report.py`: the table on the terminal and the JSON file
- `picture.py`, `tables.py`: the committed results as pictures and as tables for the docs
- `servers/`: web servers under load, with Penstock and by hand
- `peers/`: other frameworks on the same workloads, in an environment of their own
- `encoders/`: other encoders of the same texts, in another
- `install.py`: fills these two environments
"""
