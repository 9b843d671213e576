"""Whole folders of pictures and videos, labelled by an engine or a server: sources, a durable job, formats, review."""

from kestrel.labelling.endpoint import Endpoint
from kestrel.labelling.job import LabelJob, label
from kestrel.labelling.outputs import OutputPlan
from kestrel.labelling.records import Found, Frame, Item, Row
from kestrel.labelling.sources import SourceOptions
from kestrel.labelling.task import LabelTask

__all__ = [
    "Endpoint",
    "Found",
    "Frame",
    "Item",
    "LabelJob",
    "LabelTask",
    "OutputPlan",
    "Row",
    "SourceOptions",
    "label",
]
