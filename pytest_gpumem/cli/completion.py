"""``gpumem completion SHELL``: a script with which the tab key completes ``gpumem``."""

from __future__ import annotations

import argparse

from pytest_gpumem.cli.command import Answer, Argument, Command

SHELLS = ("bash", "zsh", "fish")


def run(arguments: argparse.Namespace) -> Answer:
    """Return the script; raises ``ValueError`` where argcomplete is not installed."""
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise ValueError(
            "shells complete by argcomplete, which is not installed: pip install argcomplete"
        ) from error
    script: str = shellcode(["gpumem"], shell=arguments.shell)
    return Answer(
        script.strip("\n").splitlines(), lambda: {"shell": arguments.shell, "script": script}
    )


COMMAND = Command(
    description="Print a script by which a shell completes subcommands, options, GPU models and "
    "files of gpumem.",
    run=run,
    arguments=(Argument("shell", "the shell that runs the script", choices=SHELLS),),
    examples=(
        'eval "$(gpumem completion bash)"            in ~/.bashrc, and for zsh in ~/.zshrc',
        "gpumem completion fish | source             in ~/.config/fish/config.fish",
    ),
)
