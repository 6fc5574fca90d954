"""What a profile reads: records of scopes, steps and devices, durations, and who collects them."""
