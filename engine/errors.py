"""The one base class of errors that are meant for the user."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right; its text is one clear sentence that says how.

    The command line and the child processes show the sentence alone (a traceback only with
    ``--debug``) and end with a non-zero exit status.
    """
