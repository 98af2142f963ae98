"""The ledger of memory: host-ordered allocations replayed by category."""
