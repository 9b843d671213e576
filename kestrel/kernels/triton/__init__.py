"""The operations of `kestrel.kernels` as Triton kernels, under the same names. Import a module only with a GPU at hand,
or with Triton's interpreter switched on."""
