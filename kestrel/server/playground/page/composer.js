/** The form: which skill, in what words, how long, thinking or not. It changes with the skill. */

import { byId, choiceGroup } from "./dom.js";
import { LENGTHS, SKILLS, skillsFor } from "./skills.js";

export class Composer {
  constructor({ onChange }) {
    this.onChange = onChange;
    this.offered = skillsFor(true);
    this.skill = this.offered[0];
    this.length = "normal";
    this.typed = {}; // by field: point and detect share theirs
    this.suggestions = {}; // by skill: what stands there until something is typed
    this.isRunning = false;
    const skills = SKILLS.map(({ name, title }) => ({ name, title }));
    this.showSkill = choiceGroup(byId("skills"), skills, { className: "skill", onChoose: (name) => this.choose(name) });
    const lengths = LENGTHS.map((name) => ({ name, title: name[0].toUpperCase() + name.slice(1) }));
    this.showLength = choiceGroup(byId("lengths"), lengths, {
      className: "length",
      onChoose: (name) => this.setLength(name),
    });
    byId("prompt").addEventListener("input", () => this.onText());
    byId("system").addEventListener("input", () => {
      this.show();
      this.onChange();
    });
    byId("reasoning").addEventListener("change", () => this.onChange());
    this.setAvailable({ unavailable: {}, can_reason: false }, true);
  }

  get text() {
    if (!this.skill.field) return "";
    return this.skill.keepsBlanks ? this.shownText : this.shownText.trim();
  }

  get shownText() {
    return this.typed[this.skill.field] ?? this.suggestions[this.skill.name] ?? "";
  }

  /** Whether to think first; null where that cannot be chosen. */
  get reasoning() {
    return this.skill.takesReasoning && this.canReason ? byId("reasoning").checked : null;
  }

  get system() {
    return this.skill.takesSystem ? byId("system").value.trim() : "";
  }

  /** Takes over an earlier form. */
  restore({ skill, text, length, reasoning, system }) {
    this.skill = this.named(skill);
    if (this.skill.field) this.typed[this.skill.field] = text;
    this.length = length;
    if (reasoning !== null) byId("reasoning").checked = reasoning;
    byId("system").value = system;
    this.show();
  }

  named(name) {
    return this.offered.find((skill) => skill.name === name);
  }

  choose(name) {
    if (this.unavailable[name] || this.isRunning) return;
    this.skill = this.named(name);
    this.show();
    this.onChange();
  }

  suggest(suggestions) {
    this.suggestions = suggestions;
    if (Object.keys(suggestions).length > 0) this.typed = {};
    this.show();
  }

  setText(text) {
    this.typed[this.skill.field] = text;
    this.show();
  }

  setLength(name) {
    this.length = name;
    this.show();
    this.onChange();
  }

  /** Skills of this kind of model, and those of them that cannot be used, each with the reason. */
  setAvailable({ unavailable, can_reason: canReason }, readsPictures) {
    const offered = skillsFor(readsPictures);
    Object.assign(this, { offered, unavailable, canReason });
    for (const button of byId("skills").children) {
      const reason = unavailable[button.dataset.name];
      const place = offered.findIndex(({ name }) => name === button.dataset.name);
      button.hidden = place < 0;
      button.disabled = reason !== undefined;
      button.title = reason ?? "";
      button.setAttribute("aria-keyshortcuts", `${place + 1}`);
    }
    byId("last-skill").textContent = offered.length;
    this.skill = this.named(this.skill.name) ?? offered.find(({ name }) => !unavailable[name]) ?? offered[0];
    this.show();
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    byId("run").hidden = isRunning;
    byId("new-chat").disabled = isRunning;
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
    byId("reasoning-row").hidden = this.reasoning === null;
    byId("system-row").hidden = !skill.takesSystem;
    byId("system-brief").textContent = this.system && `· ${this.system}`;
    const prompt = byId("prompt");
    prompt.hidden = skill.field === null;
    prompt.rows = skill.field === "object" ? 1 : 2;
    byId("prompt-label").textContent = skill.label;
    prompt.placeholder = skill.placeholder;
    prompt.value = this.shownText;
    byId("run").firstChild.textContent = `${skill.action} `;
  }
}
