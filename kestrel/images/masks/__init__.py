"""Masks and outlines: draw an SVG path into a mask, clean a mask, trace a mask back to an SVG path.

Path coordinates are relative to a bounding box (0..1 inside it); boxes are relative to the picture.
"""

from kestrel.images.masks.cleaning import clean_mask
from kestrel.images.masks.drawing import rasterise_path
from kestrel.images.masks.geometry import BOX_FIELDS, Mask, box_values
from kestrel.images.masks.tracing import trace_mask

__all__ = ["BOX_FIELDS", "Mask", "box_values", "clean_mask", "rasterise_path", "trace_mask"]
