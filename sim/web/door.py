"""Who may use the page: whoever has the address that the command printed, whose token becomes a cookie."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


def _token() -> str:
    return secrets.token_urlsafe(18)


@dataclass
class Door:
    """What one start of the server knows its own pages by; 127.0.0.1 alone is open to every user of a shared node.

    Attributes:
        token: in the printed address, and then in the cookie.
        instance: in the paths of what one start of the server made, so that a page of an earlier one finds out.
    """

    token: str = field(default_factory=_token)
    instance: str = field(default_factory=lambda: secrets.token_hex(4))
    _tickets: set[str] = field(default_factory=set)

    def ticket(self) -> str:
        """A token that opens the page once: for the browser's command line, which other users can read."""
        made = _token()
        self._tickets.add(made)
        return made

    def knows(self, cookie: str) -> bool:
        """Whether a cookie is one of ours."""
        return secrets.compare_digest(cookie.encode(errors="replace"), self.token.encode())

    def admits(self, given: str) -> bool:
        """Whether the token of an address opens the page; a ticket is used up by that."""
        if self.knows(given):
            return True
        if given in self._tickets:
            self._tickets.discard(given)
            return True
        return False
