"""Several workers on one GPU: which test may run now, how much it may take, why memory ran out.

``admission`` holds the rules, without clock or device; ``ledger`` keeps what all runs of
a user on this host hold and wait for; ``devices`` reads what a device really holds. Nothing here
imports torch.
"""
