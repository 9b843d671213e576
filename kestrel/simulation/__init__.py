"""Traffic on GPUs that are not there: the real scheduler and router in simulated time."""
