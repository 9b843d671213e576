"""Labels in the formats that other tools read: COCO, YOLO, Pascal VOC, CSV, JSON lines, Label Studio, parquet,
WebDataset."""

from kestrel.labelling.formats.label_set import FormatOptions, split_of, stable_classes
from kestrel.labelling.formats.writing import write_labels

__all__ = ["FormatOptions", "split_of", "stable_classes", "write_labels"]
