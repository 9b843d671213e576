"""Skills: what can be asked of a model, each as fields in, prompt and grammar, result out."""

from kestrel.skills.base import SkillRegistry, SkillSpec, SkillState
from kestrel.skills.defaults import default_registry, default_skills

__all__ = ["SkillRegistry", "SkillSpec", "SkillState", "default_registry", "default_skills"]
