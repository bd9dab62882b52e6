"""Errors that a user can mend: one line that says what, where and what instead."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong input: names the argument, its value and what would be right. Exit code 2."""

    exit_code = 2


class NoLayoutFits(InputError):
    """Every legal layout needs more memory than the devices have. Exit code 3."""

    exit_code = 3
