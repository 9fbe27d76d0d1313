"""Several workers on one GPU: which test may run now, how much it may use, why memory ran out.

``admission`` has the rules, without clock or device; ``ledger`` stores the memory that all runs of
a user on this host hold and wait for; ``devices`` reads the memory in use. Nothing here imports
torch.
"""
