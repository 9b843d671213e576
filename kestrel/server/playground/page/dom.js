/** Elements by id, and new ones with their properties and children. */

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A group of buttons of which one is chosen, moved through with the arrow keys. */
export function choiceGroup(box, choices, { onChoose, className }) {
  const buttons = choices.map(({ name, title, ...rest }) => {
    const button = element("button", { type: "button", className, ...rest, role: "radio" }, title);
    button.dataset.name = name;
    button.addEventListener("click", () => onChoose(name));
    return button;
  });
  box.replaceChildren(...buttons);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const open = buttons.filter((button) => !button.disabled && !button.hidden);
    const next = open[(open.indexOf(document.activeElement) + step + open.length) % open.length];
    next.focus();
    onChoose(next.dataset.name);
  });
  return (chosen) => {
    for (const button of buttons) {
      const isChosen = button.dataset.name === chosen;
      button.setAttribute("aria-checked", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
    }
  };
}
