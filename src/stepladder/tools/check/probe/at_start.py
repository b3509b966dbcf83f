"""What an interpreter of a checked script attaches at its start, before torch."""

from stepladder.tools.check.isolation import guard
from stepladder.tools.check.probe import hooks_launch


def attach() -> None:
    guard.attach()
    hooks_launch.attach()
