"""Whole folders of pictures and videos, labelled by an engine or a server: sources, a durable job, formats, review.

Names are read when they are asked for: the help of `kestrel label` needs none of the libraries behind them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrel.labelling.endpoint import Endpoint
    from kestrel.labelling.job import LabelJob, label
    from kestrel.labelling.pictures import SourceOptions
    from kestrel.labelling.plans import OutputPlan
    from kestrel.labelling.records import Found, Frame, Item, Row
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
_HOMES = {
    "Endpoint": "endpoint",
    "LabelJob": "job",
    "LabelTask": "task",
    "OutputPlan": "plans",
    "SourceOptions": "pictures",
    "label": "job",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"kestrel.labelling.{_HOMES.get(name, 'records')}"), name)
    raise AttributeError(f"module 'kestrel.labelling' has no attribute {name!r}")
