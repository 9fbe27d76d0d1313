"""What is in ``corpus`` is run by the tests here, in a copy."""

collect_ignore = ["corpus"]
