"""Skills: what can be asked of a model, each as fields in, prompt and grammar, result out.

Names are read when they are asked for: who checks a setting, or lists models, needs none of what is behind them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrel.skills.base import SkillRegistry, SkillSpec, SkillState
    from kestrel.skills.defaults import default_registry, default_skills

__all__ = ["SkillRegistry", "SkillSpec", "SkillState", "default_registry", "default_skills"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "defaults" if name.startswith("default_") else "base"
        return getattr(import_module(f"kestrel.skills.{home}"), name)
    raise AttributeError(f"module 'kestrel.skills' has no attribute {name!r}")
