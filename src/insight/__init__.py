"""What the counters of nodes say: profiles, the verdict on what limits a graph, live snapshots."""
