"""Several workers on one GPU: who may run now, how much each may take, and whose fault it was.

``admission`` holds the rules and knows neither clock nor device; ``ledger`` keeps what all runs of
a user on this host hold and wait for; ``host`` says what a device holds in truth. Nothing here
imports torch.
"""
