"""What an ingress knows of its replicas, by their names.

Ray makes a copy of the class of its router, with the globals of its module, and runs it in a thread of its own. Another
module is what the router and the engine have in common.
"""

from __future__ import annotations

from typing import Any

latest: dict[str, dict[str, Any]] = {}
"""What each has reported; empty of one that has not reported yet."""
silent: set[str] = set()
"""Those that give no sign of life, though nobody says that they have died."""
chosen: dict[str, str | None] = {}
"""For the id of each call, the replica that it was sent to."""
