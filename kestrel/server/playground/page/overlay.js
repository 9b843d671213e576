/** Points, boxes and outlines over the picture, in units of its pixels: the drawing fits at any size. */

import { drawn } from "./dom.js";

const LABEL_HEIGHT = 20;
const LABEL_PADDING = 6;
const POINT_RADIUS = 10;

export class Overlay {
  constructor(svg, { onHover }) {
    this.svg = svg;
    this.width = this.height = 1;
    this.layers = { mask: drawn("g"), box: drawn("g"), point: drawn("g"), label: drawn("g"), mark: drawn("g") };
    for (const [name, layer] of Object.entries(this.layers)) layer.setAttribute("class", `layer-${name}`);
    svg.append(...Object.values(this.layers));
    svg.addEventListener("pointerover", (event) => onHover(event.target.closest("[data-id]")?.dataset.id ?? null));
    svg.addEventListener("pointerleave", () => onHover(null));
    new ResizeObserver(() => this.rescale()).observe(svg);
  }

  setPicture(width, height) {
    Object.assign(this, { width, height });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.show([]);
    this.showMarks([]);
  }

  show(shapes) {
    for (const name of ["mask", "box", "point", "label"]) this.layers[name].replaceChildren();
    for (const shape of shapes) this.draw(shape);
    this.rescale();
  }

  /** Places that the visitor marked: dashed, with a letter. */
  showMarks(marks) {
    this.layers.mark.replaceChildren(...marks.map((mark, index) => this.markOf(mark, markName(index))));
    this.rescale();
  }

  setLayer(name, isVisible) {
    this.layers[name].toggleAttribute("hidden", !isVisible);
  }

  highlight(id) {
    this.svg.classList.toggle("has-lit", id !== null);
    for (const shape of this.svg.querySelectorAll("[data-id]"))
      shape.classList.toggle("is-lit", shape.dataset.id === id);
  }

  draw(shape) {
    if (shape.kind === "point") return this.drawPoint(shape);
    const { left, top, width, height } = this.frameOf(shape.box);
    if (shape.kind === "mask") {
      const transform = `translate(${left} ${top}) scale(${width} ${height})`;
      this.add("mask", shape, drawn("path", { d: shape.path, transform, fill: shape.colour, stroke: shape.colour }));
    }
    this.add("box", shape, drawn("rect", { x: left, y: top, width, height, stroke: shape.colour, rx: 0 }));
    this.drawLabel(shape, left, top);
  }

  drawPoint(shape) {
    const place = this.placed(
      shape.point.x * this.width,
      shape.point.y * this.height,
      drawn("circle", { r: POINT_RADIUS, fill: shape.colour }),
      drawn("text", { "text-anchor": "middle", dy: "0.36em", fill: inkOn(shape.colour) }, String(shape.number)),
    );
    this.add("point", shape, place);
  }

  /** A tag at the upper left corner, above the frame where there is room and inside it otherwise. */
  drawLabel(shape, left, top) {
    const text = drawn("text", { x: LABEL_PADDING, y: LABEL_HEIGHT - 6, fill: inkOn(shape.colour) }, tagOf(shape));
    const back = drawn("rect", { height: LABEL_HEIGHT, rx: 4, fill: shape.colour });
    const tag = this.placed(left, top, back, text);
    tag.dataset.tag = "";
    this.add("label", shape, tag);
    back.setAttribute("width", text.getComputedTextLength() + 2 * LABEL_PADDING);
  }

  add(layer, shape, node) {
    const group = drawn("g", { class: `shape shape-${shape.kind}` }, node);
    group.dataset.id = shape.id;
    this.layers[layer].append(group);
  }

  markOf(mark, name) {
    if (mark.length === 2) {
      const cross = drawn("path", { d: "M-12 0H-4M4 0H12M0 -12V-4M0 4V12" });
      return this.placed(
        mark[0] * this.width,
        mark[1] * this.height,
        drawn("circle", { r: 8 }),
        cross,
        drawn("text", { x: 11, y: -9 }, name),
      );
    }
    const [left, top, right, bottom] = [
      mark[0] * this.width,
      mark[1] * this.height,
      mark[2] * this.width,
      mark[3] * this.height,
    ];
    const frame = drawn("rect", { x: left, y: top, width: right - left, height: bottom - top });
    return drawn("g", {}, frame, this.placed(left, top, drawn("text", { x: 5, y: 16 }, name)));
  }

  /** Content in screen pixels around a place of the picture. */
  placed(x, y, ...content) {
    const group = drawn("g", {}, ...content);
    Object.assign(group.dataset, { x, y });
    return group;
  }

  frameOf(box) {
    const [left, right] = [box.x_min * this.width, box.x_max * this.width];
    const [top, bottom] = [box.y_min * this.height, box.y_max * this.height];
    return { left, top, width: Math.max(right - left, 0), height: Math.max(bottom - top, 0) };
  }

  /** Keeps markers and tags the same size on the screen, whatever the size of the picture. */
  rescale() {
    const shownWidth = this.svg.getBoundingClientRect().width;
    if (shownWidth === 0) return;
    const unit = this.width / shownWidth;
    for (const place of this.svg.querySelectorAll("[data-x]")) {
      let [x, y] = [Number(place.dataset.x), Number(place.dataset.y)];
      if ("tag" in place.dataset) {
        const width = Number(place.firstChild.getAttribute("width")) * unit;
        x = Math.max(0, Math.min(x, this.width - width));
        y = y >= LABEL_HEIGHT * unit ? y - LABEL_HEIGHT * unit : Math.max(y, 0);
      }
      place.setAttribute("transform", `translate(${x} ${y}) scale(${unit})`);
    }
  }
}

export const markName = (index) => String.fromCharCode(65 + (index % 26));

const tagOf = ({ number, label }) => {
  const name = label.length > 28 ? `${label.slice(0, 27)}…` : label;
  return name ? `${number} ${name}` : String(number);
};

/** Black on bright colours, white on dark ones. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#101014" : "#ffffff";
}
