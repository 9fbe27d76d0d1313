"""Stands for GitHub's ``gh``: the commands that the action uses, on a folder instead of a server.

The folder holds ``runs/<id>/<artifact>/`` and ``comments.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

SERVER = Path(os.environ["FAKE_GH"])
COMMENTS = SERVER / "comments.json"


def main(arguments: list[str]) -> int:
    with (SERVER / "calls").open("a") as calls:
        calls.write(f"{' '.join(arguments[:2])}\n")
    if arguments[:2] == ["run", "list"]:
        assert option(arguments, "--workflow") == "ci.yml"
        assert option(arguments, "--branch") == "main"
        print(*sorted((one.name for one in (SERVER / "runs").iterdir()), reverse=True), sep="\n")
        return 0
    if arguments[:2] == ["run", "download"]:
        found = SERVER / "runs" / arguments[2] / option(arguments, "--name")
        if not found.is_dir():
            return 1
        shutil.copytree(found, option(arguments, "--dir"))
        return 0
    if (SERVER / "read-only").exists() and arguments[:2] != ["pr", "view"]:
        return 1
    comments: list[dict[str, Any]] = json.loads(COMMENTS.read_text())
    if arguments[:2] == ["pr", "view"]:
        marker = option(arguments, "--jq").split('"')[1]
        assert option(arguments, "--jq") == (
            "[.comments[] | select(.viewerDidAuthor and (.body | "
            f'startswith("{marker}")))][0].url // ""'
        )
        mine = [one for one in comments if one["mine"] and one["body"].startswith(marker)]
        print(f"https://github.com/o/r/pull/7#issuecomment-{mine[0]['id']}" if mine else "")
        return 0
    if arguments[:2] == ["pr", "comment"]:
        body = Path(option(arguments, "--body-file")).read_text(encoding="utf-8")
        comments.append({"id": 100 + len(comments), "mine": True, "body": body})
    else:
        assert option(arguments, "--method") == "PATCH"
        number = next(word for word in arguments if "/comments/" in word).rpartition("/")[2]
        (one,) = [one for one in comments if str(one["id"]) == number]
        one["body"] = Path(option(arguments, "-F").removeprefix("body=@")).read_text(
            encoding="utf-8"
        )
    COMMENTS.write_text(json.dumps(comments))
    return 0


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
