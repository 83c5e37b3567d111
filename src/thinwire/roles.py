"""Roles of the members of a run: what a process does there, beside its number."""

from __future__ import annotations

# In the order of their numbers on the wire; new ones come at the end.
ROLES = ("replica", "stage", "server", "client", "rollout", "reader")


def unknown_role(role: str | int) -> str:
    """Return why there is no such role, by name or by number on the wire; empty if there is.

    Example:
        >>> unknown_role("stage"), unknown_role(9)
        ('', "there is no role '9'; allowed are replica, stage, server, client, rollout, reader")
    """
    if role in ROLES or (isinstance(role, int) and 0 <= role < len(ROLES)):
        return ""
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(role)[:40])
    return f"there is no role {shown!r}; allowed are {', '.join(ROLES)}"


def checked_role(role: str | int) -> str:
    """Return the name of a role."""
    if problem := unknown_role(role):
        raise ValueError(problem)
    return ROLES[role] if isinstance(role, int) else role
