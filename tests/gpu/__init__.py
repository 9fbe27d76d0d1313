"""The plugin on a CUDA device.

``tox -e gpu`` or ``pytest tests/gpu``. Needs torch 2.6 or later with CUDA, pytest and nvidia-ml-py;
jsonschema for baselines and reports alone, and the tests of those are skipped without it.

``GPUMEM_TEST_DEVICE=sim`` (or ``sim:T4``) lets a simulated device stand in for the real one, below
the same code: the plugin is told ``--gpumem-device=cuda`` and asks ``torch.cuda``.
"""
