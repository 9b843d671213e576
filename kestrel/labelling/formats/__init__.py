"""Labels in the formats that other tools read: COCO, YOLO, Pascal VOC, CSV, JSON lines, Label Studio, parquet,
WebDataset."""

from kestrel.labelling.formats.label_set import FormatOptions, parse_split, split_of, stable_classes
from kestrel.labelling.formats.writing import FORMATS, require_fits, write_labels

__all__ = ["FORMATS", "FormatOptions", "parse_split", "require_fits", "split_of", "stable_classes", "write_labels"]
