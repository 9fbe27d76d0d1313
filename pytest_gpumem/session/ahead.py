"""Imports made before the first measured test: modules used after bodies, which may break imports.

A body that empties ``sys.path``, or leaves a folder that is deleted, must not cost the reports of
the tests that are over.
"""

from pytest_gpumem.baseline import store, update
from pytest_gpumem.report import json_report, record, terminal
from pytest_gpumem.session import affinity, conclusion, second_run

USED_AFTERWARDS = (affinity, conclusion, json_report, record, second_run, store, terminal, update)
