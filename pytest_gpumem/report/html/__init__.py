"""The HTML report, ``--gpumem-report html:PATH`` and ``gpumem report``: one offline file."""
