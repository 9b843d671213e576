"""What each replica has reported last, in the process of an ingress.

Ray makes a copy of the class of its router, with the globals of its module, and runs it in a thread of its own. Another
module is what the router and the engine have in common.
"""

from __future__ import annotations

from typing import Any

latest: dict[str, dict[str, Any]] = {}
"""By the replica's name; empty of one that has not reported yet."""
