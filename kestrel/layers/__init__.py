"""The layers that models are made of, written once over `kestrel.kernels.ops.Ops`.

How a matrix is kept (plain or float8), what adapters add to it and which kernels run are properties of a layer, so a
model names its layers and nothing else.
"""
