"""Pages on which a person accepts or rejects what was found, and the decisions that come back from them."""
