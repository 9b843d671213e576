"""One model over several processes: which part each holds, and how the parts act together."""
