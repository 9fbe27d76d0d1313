"""The tests of this folder run a copy of ``corpus``, so pytest does not collect it."""

collect_ignore = ["corpus"]
