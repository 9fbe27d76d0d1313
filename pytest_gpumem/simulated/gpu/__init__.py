"""One device, alone: its catalogue entry, its memory, and what libraries take of it.

May use: ``common``. It knows of no other device, and of no tensor. The catalogue and
``workspace_settings`` import no torch.
"""
