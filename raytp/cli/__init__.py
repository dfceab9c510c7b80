"""The `raytp` command: `generate`, `chat` and `info`. What each command does stands in the file of its name.

Starting the command must stay quick, so Ray, transformers and whatever imports them are imported by the commands that
need them. The rest of the project does not know of this package.
"""

from raytp.cli.main import app

__all__ = ["app"]
