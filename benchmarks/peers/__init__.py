"""Other frameworks on the same workloads, each written as its own documentation recommends.

`make bench-peers` runs this in `.venv-peers`. Every peer has one file and one process of its own, in which it takes
turns with the hand-written baseline. The four workloads, and the meaning of a peer's number:

- `chain`: ten stages that do nothing, a stream of items; time over `asyncio.Queue` stages
- `call`: one call that fans out to 32 branches and joins; time over `asyncio.gather`
- `io`: 2,000 waits of 5 ms, 64 in flight; share of the ideal
- `threads`: bodies of 1 ms without the GIL on two threads; share of the speed of two bare threads

A peer's file has `WORKLOADS`: for each workload that applies to the peer, a function that opens its contenders. A
contender of `chain` or `call` returns seconds per item; a contender of `io` or `threads` returns seconds for all items.
"""
