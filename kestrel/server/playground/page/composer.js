/** The form: which skill, in what words, how long, thinking or not. It changes with the skill. */

import { byId, choiceGroup } from "./dom.js";
import { LENGTHS, SKILLS, skillNamed } from "./skills.js";

export class Composer {
  constructor({ onChange }) {
    this.onChange = onChange;
    this.skill = SKILLS[0];
    this.length = "normal";
    this.typed = {}; // by field: point and detect share theirs
    this.suggestions = {}; // by skill: what stands there until something is typed
    this.unavailable = {};
    this.canReason = false;
    this.isRunning = false;
    const skills = SKILLS.map(({ name, title }, index) => ({ name, title, "aria-keyshortcuts": `${index + 1}` }));
    this.showSkill = choiceGroup(byId("skills"), skills, { className: "skill", onChoose: (name) => this.choose(name) });
    const lengths = LENGTHS.map((name) => ({ name, title: name[0].toUpperCase() + name.slice(1) }));
    this.showLength = choiceGroup(byId("lengths"), lengths, {
      className: "length",
      onChoose: (name) => this.setLength(name),
    });
    byId("prompt").addEventListener("input", () => this.onText());
    byId("reasoning").addEventListener("change", () => this.onChange());
    this.show();
  }

  get text() {
    return this.skill.field ? this.shownText.trim() : "";
  }

  get shownText() {
    return this.typed[this.skill.field] ?? this.suggestions[this.skill.name] ?? "";
  }

  get reasoning() {
    return this.canReason && byId("reasoning").checked;
  }

  /** Takes over an earlier form. */
  restore({ skill, text, length, reasoning }) {
    this.skill = skillNamed(skill);
    if (this.skill.field) this.typed[this.skill.field] = text;
    this.length = length;
    byId("reasoning").checked = reasoning;
    this.show();
  }

  choose(name) {
    if (this.unavailable[name] || this.isRunning) return;
    this.skill = skillNamed(name);
    this.show();
    this.onChange();
  }

  suggest(suggestions) {
    this.suggestions = suggestions;
    if (Object.keys(suggestions).length > 0) this.typed = {};
    this.show();
  }

  clearText() {
    this.typed[this.skill.field] = "";
    this.show();
  }

  setLength(name) {
    this.length = name;
    this.show();
    this.onChange();
  }

  /** Skills that cannot be used, each with the reason. */
  setAvailable(unavailable, canReason) {
    Object.assign(this, { unavailable, canReason });
    for (const button of byId("skills").children) {
      const reason = unavailable[button.dataset.name];
      button.disabled = reason !== undefined;
      button.title = reason ?? "";
    }
    this.show();
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    byId("stop").hidden = !isRunning;
    byId("run").hidden = isRunning;
  }

  onText() {
    this.typed[this.skill.field] = byId("prompt").value;
    this.onChange();
  }

  show() {
    const { skill } = this;
    this.showSkill(skill.name);
    this.showLength(this.length);
    byId("skill-hint").textContent = skill.hint;
    byId("lengths").hidden = !skill.takesLength;
    byId("reasoning-row").hidden = !(skill.takesReasoning && this.canReason);
    const prompt = byId("prompt");
    prompt.hidden = skill.field === null;
    prompt.rows = skill.field === "object" ? 1 : 2;
    byId("prompt-label").textContent = skill.label;
    prompt.placeholder = skill.placeholder;
    prompt.value = this.shownText;
    byId("run").firstChild.textContent = `${skill.action} `;
  }
}
