"""Pages on which a person accepts or rejects what was found, and the decisions that come back from them."""

from kestrel.labelling.review.decisions import Decisions, read_decisions
from kestrel.labelling.review.pages import write_review

__all__ = ["Decisions", "read_decisions", "write_review"]
