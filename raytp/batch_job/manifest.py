"""The manifest: what a run is, and which part files hold which of its rows. Its word counts, not the folder's.

Entries of a `raytp.batch_job.journal`: the first says what the run is, each commit makes one more, and the last one is
that the run is complete. Called by `raytp.batch_job.output`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raytp.batch_job.journal import Journal
from raytp.errors import BatchError

_VERSION = 1
Identity = Mapping[str, Any]
"""All that decides which record a row becomes: a run is resumed with the same alone."""


@dataclass(slots=True)
class Counts:
    """Rows and tokens of one commit, or of all."""

    num_succeeded: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that have their record."""
        return self.num_succeeded + self.num_failed

    def add(self, other: Counts) -> None:
        """Take in the counts of one more commit."""
        self.num_succeeded += other.num_succeeded
        self.num_failed += other.num_failed
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_output_tokens += other.num_output_tokens
        for code, num in other.error_codes.items():
            self.error_codes[code] = self.error_codes.get(code, 0) + num


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What one commit has added."""

    number: int
    ordinals: str
    """As `raytp.batch_job.row_ids.pack_ranges` writes them."""
    output: str | None
    """The part file with records of the output, if there are any."""
    errors: str | None
    """The part file with error records, where these have a file of their own."""
    counts: Counts
    schema: str | None = None
    """Of Parquet, base64, in the first commit that has it."""


class Manifest:
    """What a journal holds, which the caller has acquired."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def create(self, identity: Identity) -> str:
        """Begin a run; its name."""
        run_id = uuid.uuid4().hex[:16]
        self._journal.create({"version": _VERSION, "run_id": run_id, "identity": identity})
        return run_id

    def reopen(self, identity: Identity) -> str:
        """Go on with a run; its name. Raises BatchError if it is another one."""
        self._journal.repair()
        header = next(self._journal.entries(), {})
        if header.get("version") != _VERSION:
            raise BatchError(
                f"{self._journal} is not the manifest of a batch job of this version: --restart discards it"
            )
        differences = _differences(header["identity"], json.loads(json.dumps(identity)))
        if differences:
            raise BatchError(
                "the output holds an earlier run with other settings: "
                + "; ".join(differences)
                + ". Use the same settings, another output, or --restart, which discards the earlier run's output"
            )
        return str(header["run_id"])

    def append(self, commit: Commit) -> None:
        """Enter a commit; its part files must be in place."""
        self._journal.append(asdict(commit))

    def finish(self, files: Sequence[str]) -> None:
        """Enter that the run is complete; `files`: those that all parts have been joined to."""
        self._journal.append({"is_finished": True, "files": list(files)})

    def commits(self) -> Iterator[Commit]:
        """Every commit so far."""
        for entry in self._journal.entries():
            if "ordinals" in entry:
                yield Commit(**(entry | {"counts": Counts(**entry["counts"])}))

    def is_finished(self) -> bool:
        """Whether the run is complete."""
        return any("is_finished" in entry for entry in self._journal.entries())

    def files(self) -> list[str]:
        """Those that all parts have been joined to."""
        return [file for entry in self._journal.entries() for file in entry.get("files", ())]


def _differences(earlier: Identity, now: Identity, prefix: str = "") -> list[str]:
    """`name: was this, is that` for each setting that has changed."""
    found = []
    for name in sorted(earlier.keys() | now.keys()):
        old, new = earlier.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {json.dumps(old)} and is {json.dumps(new)}")
    return found
