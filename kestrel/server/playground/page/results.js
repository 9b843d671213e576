/** The answer: text as it streams, thinking folded away, and what was found, lit up together with the drawing. */

import { byId, element } from "./dom.js";
import { groundedShapes, shapesOf, summaryOf } from "./outcome.js";
import { showTimings } from "./timings.js";

const LAYERS = [
  ["label", "Labels"],
  ["point", "Points"],
  ["box", "Boxes"],
  ["mask", "Masks"],
];

export class Results {
  constructor(overlay) {
    this.overlay = overlay;
    this.shapes = [];
    this.picture = null;
    this.hidden = new Set();
  }

  clear(hint) {
    for (const id of ["thoughts", "answer", "found", "timings"]) byId(id).hidden = true;
    byId("result-empty").hidden = false;
    byId("result-empty").textContent = hint;
    byId("result").classList.remove("is-busy");
    this.setShapes([], []);
  }

  /** `label` names what was looked for; `isBusy` while more is to come. */
  show(outcome, { label, picture, isBusy, seen = null, wasStopped = false }) {
    this.picture = picture;
    byId("result-empty").hidden = true;
    byId("result").classList.toggle("is-busy", isBusy);
    byId("result").setAttribute("aria-busy", String(isBusy));
    this.setShapes(shapesOf(outcome, label), groundedShapes(outcome.reasoning));
    this.showThoughts(outcome, isBusy);
    this.showText(outcome, isBusy, wasStopped);
    this.showFound(outcome, isBusy);
    showTimings(isBusy ? null : outcome.metrics, seen);
    if (!isBusy) byId("live").textContent = `${wasStopped ? "Stopped. " : ""}Answer: ${summaryOf(outcome)}`;
  }

  showThoughts({ reasoning, text }, isBusy) {
    byId("thoughts").hidden = reasoning === null;
    if (reasoning === null) return;
    const isThinking = isBusy && !text;
    byId("thoughts-title").textContent = isThinking ? "Thinking…" : "Reasoning";
    byId("thoughts").classList.toggle("is-thinking", isThinking);
    byId("thoughts-text").replaceChildren(...this.groundedText(reasoning));
  }

  /** The text with a mark on every stretch that points at something. Positions count characters, not code units. */
  groundedText({ text, grounding }) {
    const characters = Array.from(text);
    const nodes = [];
    let end = 0;
    grounding.forEach((ground, index) => {
      const id = `thought-${index}`;
      const [, blanks, words] = characters
        .slice(ground.start_idx, ground.end_idx)
        .join("")
        .match(/^(\s*)(.*)$/s);
      const mark = element("mark", { tabIndex: 0 }, words);
      mark.dataset.id = id;
      this.lightsUp(mark, id);
      nodes.push(characters.slice(end, ground.start_idx).join("") + blanks, mark);
      end = ground.end_idx;
    });
    return [...nodes, characters.slice(end).join("")];
  }

  showText(outcome, isBusy, wasStopped) {
    const hasText = outcome.text !== null || (isBusy && !outcome.points && !outcome.objects && !outcome.masks);
    byId("answer").hidden = !hasText && !wasStopped;
    byId("answer").classList.toggle("is-short", (outcome.text ?? "").length < 40);
    const notes = [];
    if (wasStopped) notes.push(element("span", { className: "answer-note" }, "stopped"));
    if (outcome.finishReason === "length")
      notes.push(element("span", { className: "answer-note" }, "cut at the limit"));
    byId("answer").replaceChildren(outcome.text?.trim() ?? "", ...notes);
  }

  showFound(outcome, isBusy) {
    const looksFor = outcome.points || outcome.objects || outcome.masks;
    byId("found").hidden = !looksFor;
    if (!looksFor) return;
    const rows = this.shapes.map((shape) => this.rowOf(shape));
    if (rows.length === 0 && !isBusy) rows.push(element("li", { className: "found-none" }, "Nothing found."));
    byId("found").replaceChildren(...rows);
  }

  rowOf(shape) {
    const number = element("span", { className: "swatch" }, String(shape.number));
    number.style.setProperty("--colour", shape.colour);
    const row = element(
      "li",
      { tabIndex: 0 },
      number,
      element("span", { className: "found-name" }, shape.label),
      element("span", { className: "found-place" }, this.placeOf(shape)),
      ...(shape.score === null ? [] : [scoreOf(shape)]),
    );
    row.dataset.id = shape.id;
    this.lightsUp(row, shape.id);
    return row;
  }

  placeOf({ point, box, kind }) {
    const pixels = (x, y) => `${Math.round(x * this.picture.width)}, ${Math.round(y * this.picture.height)}`;
    if (kind === "point") return pixels(point.x, point.y);
    const size = [(box.x_max - box.x_min) * this.picture.width, (box.y_max - box.y_min) * this.picture.height];
    return `${pixels(box.x_min, box.y_min)} · ${size.map(Math.round).join(" × ")} px`;
  }

  setShapes(shapes, thoughts) {
    this.shapes = shapes;
    const drawn = [...shapes, ...thoughts];
    this.overlay.show(drawn);
    this.showLayers(drawn);
  }

  /** A switch for each kind of thing that is drawn, and for labels where there are any. */
  showLayers(shapes) {
    const kinds = new Set(shapes.flatMap(({ kind }) => (kind === "point" ? ["point"] : [kind, "box", "label"])));
    const offered = LAYERS.filter(([name]) => kinds.has(name));
    byId("layers").replaceChildren(
      ...offered.map(([name, title]) => {
        const button = element(
          "button",
          { type: "button", className: "pill", "aria-pressed": String(!this.hidden.has(name)) },
          title,
        );
        button.dataset.layer = name;
        button.addEventListener("click", () => this.toggleLayer(name, button));
        return button;
      }),
    );
    for (const [name] of LAYERS) this.overlay.setLayer(name, !this.hidden.has(name));
  }

  toggleLayer(name, button) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.overlay.setLayer(name, !this.hidden.has(name));
  }

  /** Pointing at the row or moving the focus there lights up its shape. */
  lightsUp(node, id) {
    for (const type of ["pointerenter", "focus"]) node.addEventListener(type, () => this.light(id));
    for (const type of ["pointerleave", "blur"]) node.addEventListener(type, () => this.light(null));
  }

  light(id) {
    this.overlay.highlight(id);
    for (const row of byId("result").querySelectorAll("[data-id]"))
      row.classList.toggle("is-lit", row.dataset.id === id);
  }
}

const scoreOf = ({ score }) =>
  element(
    "span",
    { className: "found-score", title: "Score" },
    element("span", { className: "sr-only" }, "score "),
    score.toFixed(2),
  );
