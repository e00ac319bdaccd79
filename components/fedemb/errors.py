"""Every error a user can meet, and the exit code it ends the process with.

The codes are a contract with schedulers: 0 released (or simulation done), 2 bad input, 3 refused,
4 worth retrying, 5 interrupted and resumable, 6 waiting for approvals, 1 anything else, which is a
bug. A message states what is wrong, the value, the expected value and what to do. It never contains
a user id or an image name.
"""

from __future__ import annotations


class FedEmbError(Exception):
    """Base of all errors whose message is meant for the user.

    Args:
      message: one line.
      *details: further lines, printed below it.
    """

    exit_code = 1

    def __init__(self, message: str = "", *details: str) -> None:
        super().__init__(message, *details)
        self.message, self.details = message, details

    def __str__(self) -> str:
        return "\n".join((self.message, *self.details))


class ConfigError(FedEmbError):
    """The configuration contradicts itself or holds a value out of bounds."""

    exit_code = 2


class InputError(FedEmbError):
    """An input is missing, unreadable, or lacks a column of the configuration."""

    exit_code = 2


class ArtifactError(FedEmbError):
    """An artifact is incomplete, has another schema version, or does not match its digest."""

    exit_code = 2


class StorageError(FedEmbError):
    """A store cannot be reached, written or read: permission, credentials, disk, network."""

    exit_code = 4


class Refused(FedEmbError):
    """A privacy rule refuses the run. Retrying does not help."""

    exit_code = 3


class BudgetExceeded(Refused):
    """A user block would pass its cap."""


class LedgerError(Refused):
    """The ledger is broken, incomplete, or does not hold what a step needs."""


class SignatureInvalid(Refused):
    """A signature is missing, made by an unknown key, or does not match its content."""


class PlanMismatch(Refused):
    """The mechanism of the run differs from the planned and reserved one."""


class UnsupportedAccounting(Refused):
    """No accountant is known to be valid for this event under this neighbouring relation."""


class GateDenied(Refused):
    """The gate found reasons against the release."""


class AwaitingApproval(GateDenied):
    """The release lacks only approvals; once they are given, the gate allows it."""

    exit_code = 6


class Diverged(Refused):
    """A trained model gives numbers that are not finite, so nothing can be said of it."""


class Superseded(Refused):
    """The step was started again; this process has nothing to do any more."""


class Interrupted(FedEmbError):
    """The run was asked to stop, finished its round and can be resumed."""

    exit_code = 5
