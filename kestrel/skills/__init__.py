"""Skills: what can be asked of a model, each as fields in, prompt and grammar, result out.

The table of all of them is read when it is asked for: templates of conversations need a library of their own.
"""

from typing import TYPE_CHECKING, Any

from kestrel.skills.base import SkillRegistry, SkillSpec, SkillState

if TYPE_CHECKING:
    from kestrel.skills.defaults import default_registry, default_skills

__all__ = ["SkillRegistry", "SkillSpec", "SkillState", "default_registry", "default_skills"]


def __getattr__(name: str) -> Any:
    if name in ("default_registry", "default_skills"):
        from kestrel.skills import defaults  # noqa: PLC0415

        return getattr(defaults, name)
    raise AttributeError(f"module 'kestrel.skills' has no attribute {name!r}")
