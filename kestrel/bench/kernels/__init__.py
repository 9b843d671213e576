"""The kernels alone: each operation's Triton version against its plain version, at the sizes of the models."""
